// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"encoding/binary"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// removeTables removes CRIU's tables from the thread's network. It asks the kernel: CRIU has nftables as a library,
// and the node may have no program for it.
func removeTables() (removed bool, err error) {
	s, err := host.OpenNetlink(unix.NETLINK_NETFILTER, unlockTimeout)
	if err != nil {
		return false, err
	}
	defer s.Close()
	const tables = unix.NFNL_SUBSYS_NFTABLES << 8
	var names []string
	err = s.Ask(netfilterMessage(tables|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, ""), func(table []byte) {
		if name := tableName(table); strings.HasPrefix(name, "CRIU-") {
			names = append(names, name)
		}
	})
	for _, name := range names {
		if err != nil {
			break
		}
		batch := netfilterMessage(unix.NFNL_MSG_BATCH_BEGIN, 0, "")
		batch = append(batch, netfilterMessage(tables|unix.NFT_MSG_DELTABLE, unix.NLM_F_ACK, name)...)
		batch = append(batch, netfilterMessage(unix.NFNL_MSG_BATCH_END, 0, "")...)
		err = s.Ask(batch, func([]byte) {})
		removed = removed || err == nil
	}
	if err != nil {
		return removed, fmt.Errorf("remove CRIU's tables of nftables: %w", err)
	}
	return removed, nil
}

// netfilterMessage is a message about a table of the family inet, or about all; or one that is around a batch.
func netfilterMessage(kind, flags uint16, table string) []byte {
	family := byte(unix.NFPROTO_INET)
	if kind < unix.NLMSG_MIN_TYPE+2 { // a batch's begin or end
		family = unix.AF_UNSPEC
	}
	body := binary.BigEndian.AppendUint16([]byte{family, 0}, unix.NFNL_SUBSYS_NFTABLES) // which a batch is for
	if table != "" {
		body = binary.NativeEndian.AppendUint16(body, uint16(unix.SizeofNlAttr+len(table)+1))
		body = binary.NativeEndian.AppendUint16(body, unix.NFTA_TABLE_NAME)
		body = append(append(body, table...), 0)
		body = append(body, make([]byte, -len(body)&3)...)
	}
	return host.NetlinkMessage(kind, flags, body)
}

// tableName is the name in the kernel's answer about a table: four bytes, and attributes.
func tableName(answer []byte) string {
	for kind, value := range host.NetlinkAttributes(answer, 4) {
		if kind == unix.NFTA_TABLE_NAME {
			return strings.TrimRight(string(value), "\x00")
		}
	}
	return ""
}
