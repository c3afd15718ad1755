// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package different

import (
	"errors"
	"slices"
	"strings"
	"testing"

	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// What the table says can be noted and read, in words of one line that an event can list.
func TestParse(t *testing.T) {
	var text strings.Builder
	var want []string
	for _, k := range Kinds {
		want = append(want, k.String())
		text.WriteString(k.String() + "\n")
		if strings.Contains(k.String(), Separator) {
			t.Errorf("%q has %q", k, Separator)
		}
	}
	if got, err := parse(strings.NewReader(text.String())); err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v", got, err)
	}
	for _, bad := range []string{"a\n\nb\n", "\x1b[2J\n", strings.Repeat("a\n", mostLines+1), strings.Repeat("a", longest+1)} {
		if got, err := parse(strings.NewReader(bad)); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%.20q is %.20q, %v", bad, got, err)
		}
	}
}

// CRIU goes by the ports, which raw sockets have none of.
func TestRawSockets(t *testing.T) {
	for name, test := range map[string]struct {
		kind, proto, to uint32 // to is the port
		from, at        []uint32
		table           string
		unbound         bool
	}{
		"bound":              {unix.SOCK_RAW, unix.IPPROTO_ICMP, 0, []uint32{1}, []uint32{0}, "raw", true},
		"a bound ping":       {unix.SOCK_DGRAM, unix.IPPROTO_ICMP, 0, []uint32{1}, []uint32{0}, "", true},
		"of IPv6":            {unix.SOCK_RAW, unix.IPPROTO_ICMPV6, 0, []uint32{0, 0, 0, 1}, make([]uint32, 4), "raw6", true},
		"bound, of UDP":      {unix.SOCK_RAW, unix.IPPROTO_UDP, 0, []uint32{1}, []uint32{0}, "raw", false},
		"connected":          {unix.SOCK_RAW, unix.IPPROTO_UDP, 0, []uint32{1}, []uint32{1}, "raw", true},
		"connected, by port": {unix.SOCK_RAW, unix.IPPROTO_UDP, 7, []uint32{1}, []uint32{1}, "raw", false},
		"neither":            {unix.SOCK_RAW, unix.IPPROTO_ICMP, 0, []uint32{0}, []uint32{0}, "raw", false},
		"UDP":                {unix.SOCK_DGRAM, unix.IPPROTO_UDP, 0, []uint32{1}, []uint32{0}, "udp", false},
	} {
		family := uint32(unix.AF_INET)
		if len(test.from) > 1 {
			family = unix.AF_INET6
		}
		s := &skinet.InetSkEntry{Family: &family, Type: &test.kind, Proto: &test.proto, SrcAddr: test.from, DstAddr: test.at, DstPort: &test.to}
		if table, is := tableOf(s), unbound(s); table != test.table || is != test.unbound {
			t.Errorf("%s: in %q, unbound %v", name, table, is)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("a: b\n")
	f.Fuzz(func(_ *testing.T, text string) { _, _ = parse(strings.NewReader(text)) })
}
