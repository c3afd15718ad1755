// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
)

// envServes has the test program be the server of the pods of TestPods.
const envServes = "GPUCKPT_TEST_SERVES"

// The server's ports, from that of its counter on.
const (
	httpPort = counterPort + 1
	grpcPort = counterPort + 2
)

// server is a server in Go, as people have them: it watches its configuration, and answers probes.
type server struct {
	count  int
	kept   map[string]*os.File
	events atomic.Int64
	huge   []byte
}

// serve is the server's main function.
func serve(args []string) error {
	flags := flag.NewFlagSet("server", flag.ExitOnError)
	port := flags.Int("port", counterPort, "of the counter, by UDP; those of HTTP and gRPC follow")
	write := flags.String("write", "", "PATH=TEXT: only write that file")
	keep := flags.String("open", "", "keep these files open, with commas")
	watch := flags.String("watch", "", "watch these, with commas")
	huge := flags.Bool("huge", false, "have memory in a huge page")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if name, text, ok := strings.Cut(*write, "="); ok {
		return os.WriteFile(name, []byte(text), 0o644)
	}
	s := &server{count: 100, kept: make(map[string]*os.File)}
	for name := range strings.FieldsFuncSeq(*keep, isComma) {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		s.kept[name] = f
	}
	if *watch != "" {
		if err := s.watch(*watch); err != nil {
			return err
		}
	}
	if *huge {
		var err error
		if s.huge, err = unix.Mmap(-1, 0, 2<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB); err != nil {
			return fmt.Errorf("map a huge page: %w", err)
		}
		copy(s.huge, "huge")
	}
	at := func(p int) string { return ":" + strconv.Itoa(p) }
	questions, err := net.ListenPacket("udp4", at(*port)) // before probes are answered
	if err != nil {
		return err
	}
	ended := make(chan error, 3)
	go func() {
		http.HandleFunc("/healthz", func(http.ResponseWriter, *http.Request) {})
		ended <- http.ListenAndServe(at(*port+1), nil)
	}()
	go func() {
		l, err := net.Listen("tcp", at(*port+2))
		if err == nil {
			g := grpc.NewServer()
			healthpb.RegisterHealthServer(g, health.NewServer())
			err = g.Serve(l)
		}
		ended <- err
	}()
	go func() { ended <- s.answer(questions) }()
	return <-ended
}

func isComma(r rune) bool { return r == ',' }

// watch counts what happens to files.
func (s *server) watch(names string) error {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
	if err != nil {
		return err
	}
	for name := range strings.FieldsFuncSeq(names, isComma) {
		if _, err := unix.InotifyAddWatch(fd, name, unix.IN_CREATE|unix.IN_MOVED_TO|unix.IN_DELETE_SELF|unix.IN_ATTRIB); err != nil {
			return fmt.Errorf("watch %s: %w", name, err)
		}
	}
	go func() {
		for buf := make([]byte, 4096); ; {
			if n, err := unix.Read(fd, buf); n > 0 {
				s.events.Add(1)
			} else if !errors.Is(err, unix.EINTR) {
				return
			}
		}
	}()
	return nil
}

// answer answers questions, a packet each.
func (s *server) answer(l net.PacketConn) error {
	for buf := make([]byte, 4096); ; {
		n, from, err := l.ReadFrom(buf)
		if err != nil {
			return err
		}
		if _, err := l.WriteTo([]byte(s.reply(string(buf[:n]))), from); err != nil {
			return err
		}
	}
}

func (s *server) reply(question string) string {
	what, rest, _ := strings.Cut(question, " ")
	name, text, _ := strings.Cut(rest, " ")
	var data []byte
	var err error
	switch what {
	case "count":
		s.count++
		return strconv.Itoa(s.count)
	case "events":
		return strconv.FormatInt(s.events.Load(), 10)
	case "env":
		return os.Getenv(name)
	case "huge":
		return string(s.huge[:4])
	case "read":
		data, err = os.ReadFile(name)
	case "kept": // a file that is open all the time, from its start
		f := s.kept[name]
		if f == nil {
			return "not kept"
		}
		data = make([]byte, 2048)
		n, _ := f.ReadAt(data, 0)
		data = data[:n]
	case "say":
		fmt.Println(rest)
	case "write":
		err = os.WriteFile(name, []byte(text), 0o644)
	default:
		return "what?"
	}
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(data[:min(len(data), 2048)]))
}
