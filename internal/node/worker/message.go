// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// headerBytes precede a message: its length (4 bytes) and its request's number (8), little-endian.
const headerBytes = 12

// Message is a request or an answer as it has arrived.
type Message struct {
	ID    uint64 // its number: an answer has its request's
	Body  []byte
	Files []*os.File // the receiver's, which closes them
}

// Close closes the files of a message.
func (m Message) Close() { closeAll(m.Files) }

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// errFrame says that what was read is no frame.
var errFrame = errors.New("not a message")

// encode writes a value and refuses one that the other side would.
func encode(value any, most int) ([]byte, error) {
	body, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode a message: %w", err)
	}
	if len(body) > most {
		return nil, fmt.Errorf("a message of %d bytes is longer than %d", len(body), most)
	}
	return body, nil
}

// Decode reads one value, and refuses unknown fields and anything behind it. If the
// value has a method Check, its error is an error of Decode.
func Decode(body []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(into); err != nil {
		return err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more than one value in a message")
	}
	if c, ok := into.(interface{ Check() error }); ok {
		return c.Check()
	}
	return nil
}

// MaxFiles is how many files a message carries at most (SCM_MAX_FD).
const MaxFiles = 253

// writeFrame writes a message. Its files go with its first byte.
func writeFrame(to *os.File, id uint64, body []byte, files []*os.File) error {
	frame := binary.LittleEndian.AppendUint32(make([]byte, 0, headerBytes+len(body)), uint32(len(body)))
	frame = binary.LittleEndian.AppendUint64(frame, id)
	frame = append(frame, body...)
	if len(files) > 0 {
		n, err := writeFiles(to, frame, files)
		if err != nil {
			return err
		}
		frame = frame[n:]
	}
	_, err := to.Write(frame)
	return err
}

// writeFiles writes files with some of the bytes, and returns how many that were.
func writeFiles(to *os.File, data []byte, files []*os.File) (n int, err error) {
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	conn, err := to.SyscallConn()
	if err != nil {
		return 0, err
	}
	werr := conn.Write(func(fd uintptr) bool {
		for {
			n, err = unix.SendmsgN(int(fd), data, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
			if !errors.Is(err, unix.EINTR) {
				return !errors.Is(err, unix.EAGAIN)
			}
		}
	})
	runtime.KeepAlive(files)
	if werr != nil {
		return 0, werr
	}
	return n, err
}

// readFrame reads a message. Its files are the caller's. It returns io.EOF at the end, errFrame for
// anything else.
func readFrame(from *os.File, most int) (m Message, err error) {
	defer func() {
		if err != nil {
			m.Close()
			m = Message{}
		}
	}()
	var header [headerBytes]byte
	if m.Files, err = readHeader(from, header[:]); err != nil {
		return m, err
	}
	length := binary.LittleEndian.Uint32(header[:])
	if m.ID = binary.LittleEndian.Uint64(header[4:]); m.ID == 0 || uint64(length) > uint64(most) {
		return m, fmt.Errorf("%w: number %d, %d bytes", errFrame, m.ID, length)
	}
	m.Body = make([]byte, length)
	_, err = io.ReadFull(from, m.Body)
	return m, err
}

// readHeader fills a header, and returns the files that come with it.
func readHeader(from *os.File, header []byte) (files []*os.File, err error) {
	conn, err := from.SyscallConn()
	if err != nil {
		return nil, err
	}
	rights := make([]byte, unix.CmsgSpace(4*MaxFiles))
	for at := 0; at < len(header); {
		var n, length, flags int
		rerr := conn.Read(func(fd uintptr) bool {
			for {
				n, length, flags, _, err = unix.Recvmsg(int(fd), header[at:], rights, unix.MSG_CMSG_CLOEXEC)
				if !errors.Is(err, unix.EINTR) {
					return !errors.Is(err, unix.EAGAIN)
				}
			}
		})
		more, perr := parseFiles(rights[:length])
		files = append(files, more...)
		switch {
		case rerr != nil:
			return files, rerr
		case err != nil:
			return files, os.NewSyscallError("recvmsg", err)
		case perr != nil:
			return files, fmt.Errorf("%w: %w", errFrame, perr)
		case flags&unix.MSG_CTRUNC != 0:
			return files, fmt.Errorf("%w: this process has no room for its files", errFrame)
		case n == 0 && at == 0:
			return files, io.EOF
		case n == 0:
			return files, io.ErrUnexpectedEOF
		}
		at += n
	}
	return files, nil
}

func parseFiles(rights []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), "received"))
		}
	}
	return files, nil
}
