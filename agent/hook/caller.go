// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
)

// local reports whether a request is of a process of the node's own network with the given user, as the
// kubelet is. Other nodes get no answer, nor do pods that are not root on the node's network.
func local(r *http.Request, uid int) bool {
	self, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	at, err := netip.ParseAddrPort(self.String())
	from, ferr := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil || ferr != nil {
		return false
	}
	file, from, at := "/proc/net/tcp", netip.AddrPortFrom(from.Addr().Unmap(), from.Port()), netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	if from.Addr().Is6() {
		file = "/proc/net/tcp6"
	}
	sockets, err := os.Open(file)
	if err != nil {
		return false
	}
	defer sockets.Close()
	for lines := bufio.NewScanner(sockets); lines.Scan(); { // sl, local address, remote address, …, uid
		if f := strings.Fields(lines.Text()); len(f) > 7 && f[1] == inProc(from) && f[2] == inProc(at) {
			return f[7] == strconv.Itoa(uid)
		}
	}
	return false
}

// inProc returns an address as /proc/net/tcp has it: words of four bytes, the last byte first.
func inProc(a netip.AddrPort) string {
	bytes := a.Addr().AsSlice()
	for word := range slices.Chunk(bytes, 4) {
		slices.Reverse(word)
	}
	return fmt.Sprintf("%s:%04X", strings.ToUpper(hex.EncodeToString(bytes)), a.Port())
}
