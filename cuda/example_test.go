// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// Take all CUDA processes of a container off their GPUs and back.
func Example() {
	ctx := context.Background()
	pids := []int{4711, 4712} // from the container's cgroup
	h, err := cuda.Start(ctx, cuda.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer h.Close()
	group, err := cuda.Find(ctx, h, pids)
	if err != nil {
		log.Fatal(err)
	}
	if err := group.Lock(ctx, h, 10*time.Second); err != nil {
		log.Fatal(err)
	}
	// Whatever happens, the processes run on: Unlock ignores the end of ctx.
	defer group.Unlock(ctx, h)
	if err := group.Checkpoint(ctx, h); err != nil {
		log.Print(err) // the processes are as before: locked
		return
	}
	// Here CRIU can dump them.
	if err := group.Restore(ctx, h, nil); err != nil {
		log.Print(err)
	}
}

func ExampleParsePairs() {
	pairs, err := cuda.ParsePairs("GPU-5af7c0da-0000-4000-8000-000000000000=GPU-5af7c0da-0000-4000-8000-000000000001")
	fmt.Println(len(pairs), pairs[0].New, err)
	_, err = cuda.ParsePairs("0=1")
	fmt.Println(err)
	// Output:
	// 1 GPU-5af7c0da-0000-4000-8000-000000000001 <nil>
	// GPU map: "0" is not a GPU's UUID
}

func ExampleNewRanges() {
	before := []cuda.Range{{Start: 0x1000, End: 0x3000}}
	after := []cuda.Range{{Start: 0x1000, End: 0x8000}} // the kernel joined old and new
	for _, a := range cuda.NewRanges(before, after) {
		fmt.Printf("%#x-%#x, %d bytes\n", a.Start, a.End, a.Bytes())
	}
	// Output: 0x3000-0x8000, 20480 bytes
}

func ExampleError() {
	err := fmt.Errorf("checkpoint container: %w",
		&cuda.Error{Op: "lock", PID: 4711, Result: cuda.NotReady})
	var refused *cuda.Error
	fmt.Println(errors.As(err, &refused) && refused.Result == cuda.NotReady)
	fmt.Println(err)
	// Output:
	// true
	// checkpoint container: lock CUDA process 4711: CUDA_ERROR_NOT_READY (600): device not ready
}
