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
)

// headerBytes precede a message: its length (4 bytes) and its request's number (8), little-endian.
const headerBytes = 12

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

// writeFrame writes a message by a single write.
func writeFrame(to io.Writer, id uint64, body []byte) error {
	frame := binary.LittleEndian.AppendUint32(make([]byte, 0, headerBytes+len(body)), uint32(len(body)))
	frame = binary.LittleEndian.AppendUint64(frame, id)
	_, err := to.Write(append(frame, body...))
	return err
}

// readFrame reads a message. It returns io.EOF at the end, errFrame for anything else.
func readFrame(from io.Reader, most int) (id uint64, body []byte, err error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(from, header[:]); err != nil {
		return 0, nil, err
	}
	length := binary.LittleEndian.Uint32(header[:])
	if id = binary.LittleEndian.Uint64(header[4:]); id == 0 || uint64(length) > uint64(most) {
		return 0, nil, fmt.Errorf("%w: number %d, %d bytes", errFrame, id, length)
	}
	body = make([]byte, length)
	if _, err := io.ReadFull(from, body); err != nil {
		return 0, nil, err
	}
	return id, body, nil
}
