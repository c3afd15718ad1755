// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// removeTables removes CRIU's tables from the thread's network. It asks the kernel: CRIU has nftables as a library,
// and the node may have no program for it.
func removeTables() (removed bool, err error) {
	s, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return false, fmt.Errorf("ask the kernel for nftables: %w", err)
	}
	defer unix.Close(s)
	wait := unix.NsecToTimeval(unlockTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return false, err
	}
	const tables = unix.NFNL_SUBSYS_NFTABLES << 8
	var names []string
	err = askNetfilter(s, netfilterMessage(tables|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, ""), func(table []byte) {
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
		err = askNetfilter(s, batch, func([]byte) {})
		removed = removed || err == nil
	}
	if err != nil {
		return removed, fmt.Errorf("remove CRIU's tables of nftables: %w", err)
	}
	return removed, nil
}

// netfilterMessage is a message about a table of the family inet, or about all; or one that is around a batch.
func netfilterMessage(kind, flags uint16, table string) []byte {
	var body []byte
	if table != "" {
		body = binary.NativeEndian.AppendUint16(body, uint16(unix.SizeofNlAttr+len(table)+1))
		body = binary.NativeEndian.AppendUint16(body, unix.NFTA_TABLE_NAME)
		body = append(append(body, table...), 0)
		body = append(body, make([]byte, -len(body)&3)...)
	}
	family := byte(unix.NFPROTO_INET)
	if kind < unix.NLMSG_MIN_TYPE+2 { // a batch's begin or end
		family = unix.AF_UNSPEC
	}
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.SizeofNlMsghdr+4+len(body)))
	m = binary.NativeEndian.AppendUint16(m, kind)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|flags)
	m = append(m, make([]byte, 8)...) // the number and the port
	m = append(m, family, 0)
	m = binary.BigEndian.AppendUint16(m, unix.NFNL_SUBSYS_NFTABLES) // which a batch is for
	return append(m, body...)
}

// askNetfilter sends messages and calls each for what the kernel answers, until it says that this was all.
func askNetfilter(s int, messages []byte, each func(answer []byte)) error {
	if err := unix.Sendto(s, messages, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	buffer := make([]byte, 1<<16)
	for {
		n, _, err := unix.Recvfrom(s, buffer, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		answers, err := syscall.ParseNetlinkMessage(buffer[:n])
		if err != nil {
			return err
		}
		for _, a := range answers {
			switch {
			case a.Header.Type == unix.NLMSG_DONE:
				return nil
			case a.Header.Type != unix.NLMSG_ERROR:
				each(a.Data)
			case len(a.Data) >= 4 && binary.NativeEndian.Uint32(a.Data) != 0:
				return unix.Errno(-int32(binary.NativeEndian.Uint32(a.Data)))
			default:
				return nil
			}
		}
	}
}

// tableName is the name in the kernel's answer about a table: four bytes, and attributes.
func tableName(answer []byte) string {
	left := answer[min(4, len(answer)):]
	for len(left) >= unix.SizeofNlAttr {
		size := int(binary.NativeEndian.Uint16(left))
		if size < unix.SizeofNlAttr || size > len(left) {
			break
		}
		if binary.NativeEndian.Uint16(left[2:]) == unix.NFTA_TABLE_NAME {
			return strings.TrimRight(string(left[unix.SizeofNlAttr:size]), "\x00")
		}
		left = left[min((size+3)&^3, len(left)):]
	}
	return ""
}
