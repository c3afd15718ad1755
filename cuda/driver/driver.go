// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

// #cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra -Werror
// #cgo LDFLAGS: -ldl -rdynamic
// #include "libcuda.h"
import "C"

import (
	"cmp"
	"encoding/json"
	"fmt"
	"unsafe"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// load loads the driver. It returns nil, or the fault to answer all requests with.
func load() *wire.Reply {
	var why [512]C.char
	if C.gk_load(&why[0], C.size_t(len(why))) != 0 {
		return &wire.Reply{Fault: wire.FaultNoDriver, Text: C.GoString(&why[0])}
	}
	if C.gk_can_checkpoint() == 0 {
		return &wire.Reply{Fault: wire.FaultTooOld, Text: cmp.Or(driverVersion(), "unknown")}
	}
	return nil
}

// initialise has the driver bring the GPUs up. What it returns is as load's.
func initialise() *wire.Reply {
	if r := C.gk_init(); r != 0 {
		return &wire.Reply{Fault: wire.FaultInit, Code: int(r), Text: text(r)}
	}
	return nil
}

// serve carries out one request. It blocks as long as the driver does.
func serve(q wire.Request, facts func() facts) wire.Reply {
	var r, value C.int
	switch q.Op {
	case wire.OpInfo:
		if q.Fresh {
			return info(readFacts())
		}
		return info(facts())
	case wire.OpState:
		r = C.gk_state(C.int(q.PID), &value)
	case wire.OpRestoreThread:
		r = C.gk_restore_thread(C.int(q.PID), &value)
	case wire.OpLock:
		r = C.gk_lock(C.int(q.PID), C.uint(q.TimeoutMS))
	case wire.OpCheckpoint:
		r = C.gk_checkpoint(C.int(q.PID))
	case wire.OpRestore:
		r = restore(q)
	case wire.OpUnlock:
		r = C.gk_unlock(C.int(q.PID))
	case wire.OpMemoryOn:
		return memoryOn(q)
	case wire.OpReaches:
		return reaches(q)
	}
	if r != 0 {
		return wire.Reply{Code: int(r), Text: text(r)} // the driver leaves value undefined
	}
	return wire.Reply{Value: int(value)}
}

func restore(q wire.Request) C.int {
	if len(q.Pairs) == 0 {
		return C.gk_restore(C.int(q.PID), nil, 0)
	}
	pairs := make([]C.gk_pair, len(q.Pairs))
	for i, p := range q.Pairs {
		pairs[i] = C.gk_pair{old_uuid: uuid(p.Old), new_uuid: uuid(p.New)}
	}
	return C.gk_restore(C.int(q.PID), &pairs[0], C.uint(len(pairs)))
}

// memoryOn asks the kernel module what memory of each GPU a process has.
func memoryOn(q wire.Request) wire.Reply {
	found := make([]cuda.MemoryOn, len(q.Minors))
	if len(found) == 0 {
		return answer(found)
	}
	minors := make([]C.int, len(q.Minors))
	for i, n := range q.Minors {
		minors[i] = C.int(n)
	}
	has := make([]C.gk_memory_on, len(minors))
	var why [256]C.char
	if C.gk_memory_of(C.int(q.PID), &minors[0], C.int(len(minors)), &has[0], &why[0], C.size_t(len(why))) != 0 {
		return wire.Reply{Fault: wire.FaultModule, Text: C.GoString(&why[0])}
	}
	for i, h := range has {
		found[i] = cuda.MemoryOn{Own: uint64(h.own), Imported: uint64(h.imported)}
	}
	return answer(found)
}

// reaches asks the kernel module whether a process reaches memory of one GPU from another.
func reaches(q wire.Request) wire.Reply {
	var peers C.int
	var why [256]C.char
	if C.gk_reaches(C.int(q.PID), &peers, &why[0], C.size_t(len(why))) != 0 {
		return wire.Reply{Fault: wire.FaultModule, Text: C.GoString(&why[0])}
	}
	return wire.Reply{Value: int(peers)}
}

// uuid converts a UUID that wire.Request.Check has checked.
func uuid(s string) C.gk_uuid {
	id, _ := wire.ParseUUID(s)
	return *(*C.gk_uuid)(unsafe.Pointer(&id))
}

func info(known facts) wire.Reply {
	var version, count C.int
	r := C.gk_driver_version(&version)
	if r == 0 {
		r = C.gk_device_count(&count)
	}
	if r != 0 {
		return wire.Reply{Code: int(r), Text: text(r)}
	}
	found := cuda.Info{
		DriverVersion: known.version,
		CUDAVersion:   fmt.Sprintf("%d.%d", version/1000, version%1000/10),
	}
	if tooOld(found.DriverVersion) {
		return wire.Reply{Fault: wire.FaultTooOld, Text: found.DriverVersion}
	}
	for i := range int(count) {
		var (
			id     C.gk_uuid
			name   [256]C.char
			bus    [32]C.char
			memory C.uint64_t
		)
		if r := C.gk_device(C.int(i), &id, &name[0], C.int(len(name)), &memory, &bus[0], C.int(len(bus))); r != 0 {
			return wire.Reply{Code: int(r), Text: text(r)}
		}
		gpu := cuda.GPU{
			UUID: wire.FormatUUID(*(*[16]byte)(unsafe.Pointer(&id))), Name: C.GoString(&name[0]), Memory: uint64(memory),
			Index: i, Minor: -1, PCIBusID: C.GoString(&bus[0]),
		}
		if g, ok := known.gpus[gpu.UUID]; ok {
			// CUDA's ordinals are by speed, and of the visible ones only.
			gpu.Index, gpu.Minor, gpu.Free, gpu.VGPU = g.Index, g.Minor, g.Free, g.VGPU
		}
		found.GPUs = append(found.GPUs, gpu)
	}
	found.Partitioned = partitioned(known.gpus)
	return answer(found)
}

func answer(value any) wire.Reply {
	data, _ := json.Marshal(value) // of plain structs: it does not fail
	return wire.Reply{Answer: data}
}

func text(r C.int) string {
	if s := C.gk_text(r); s != nil {
		return C.GoString(s)
	}
	return ""
}
