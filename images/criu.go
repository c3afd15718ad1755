// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// CRIU's images that are read here (criu/include/magic.h): two magic numbers,
// then entries, each its length as 32 bits little-endian and a protobuf message.
const (
	criuCommonMagic = 0x54564319
	criuMountsMagic = 0x55563928 // mountpoints-N.img, messages mnt_entry
	criuFilesMagic  = 0x56303138 // files.img, messages file_entry
)

// maxCRIUImage bounds what is read of one of these images, in bytes. A mount
// takes some 150 bytes, a file some 100.
const maxCRIUImage = 64 << 20

// ErrCRIUImage says that an image is not as CRIU writes it.
var ErrCRIUImage = errors.New("malformed CRIU image")

// Mounts gives the paths in the container at which a dump had something mounted
// from outside: bind mounts of the container's spec, in CRIU's words external
// mounts, by their keys. Each once, in order. dir is a directory of CRIU's
// images; one without any gives none.
func Mounts(dir string) ([]string, error) {
	names, err := filepath.Glob(filepath.Join(dir, "mountpoints-*.img"))
	if err != nil {
		return nil, fmt.Errorf("find CRIU's images: %w", err)
	}
	var paths []string
	for _, name := range names {
		found, err := readCRIU(name, criuMountsMagic, mountKey)
		if err != nil {
			return nil, err
		}
		paths = append(paths, found...)
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// Files gives the regular files that the processes of a dump have open or
// mapped, by their paths in the container, each once, in order.
func Files(dir string) ([]string, error) {
	paths, err := readCRIU(filepath.Join(dir, "files.img"), criuFilesMagic, regularFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	slices.Sort(paths)
	return slices.Compact(paths), err
}

// readCRIU reads one image, and of each entry what pick finds.
func readCRIU(name string, magic uint32, pick func(entry []byte) (string, error)) ([]string, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("read CRIU's image: %w", err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil {
		return nil, fmt.Errorf("read CRIU's image: %w", err)
	} else if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%w: %s is not a regular file", ErrCRIUImage, name)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxCRIUImage+1))
	if err != nil {
		return nil, fmt.Errorf("read CRIU's image: %w", err)
	}
	paths, err := parseCRIU(data, magic, pick)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrCRIUImage, name, err)
	}
	return paths, nil
}

func parseCRIU(data []byte, magic uint32, pick func(entry []byte) (string, error)) ([]string, error) {
	if len(data) > maxCRIUImage {
		return nil, fmt.Errorf("larger than %d bytes", maxCRIUImage)
	}
	if len(data) < 8 || binary.LittleEndian.Uint32(data) != criuCommonMagic || binary.LittleEndian.Uint32(data[4:]) != magic {
		return nil, errors.New("another magic number")
	}
	var paths []string
	for data = data[8:]; len(data) > 0; {
		if len(data) < 4 {
			return nil, io.ErrUnexpectedEOF
		}
		n := uint64(binary.LittleEndian.Uint32(data))
		if uint64(len(data)-4) < n {
			return nil, io.ErrUnexpectedEOF
		}
		path, err := pick(data[4 : 4+n])
		if err != nil {
			return nil, err
		}
		if path != "" {
			paths = append(paths, path)
		}
		data = data[4+n:]
	}
	return paths, nil
}

// mountKey is ext_key of a mnt_entry (images/mnt.proto): what runc called the
// mount, its path in the container; empty for one that is not external.
func mountKey(entry []byte) (string, error) { return field(entry, 18) }

// regularFile is reg.name of a file_entry (images/fdinfo.proto and
// regfile.proto); empty for other kinds of files.
func regularFile(entry []byte) (string, error) {
	reg, err := field(entry, 3)
	if err != nil || reg == "" {
		return "", err
	}
	return field([]byte(reg), 6)
}

// field gives the last length-delimited field of that number in a message;
// empty when there is none.
func field(message []byte, number protowire.Number) (value string, err error) {
	for len(message) > 0 {
		num, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return "", protowire.ParseError(n)
		}
		message = message[n:]
		size := protowire.ConsumeFieldValue(num, kind, message)
		if size < 0 {
			return "", protowire.ParseError(size)
		}
		if num == number {
			bytes, m := protowire.ConsumeBytes(message)
			if kind != protowire.BytesType || m < 0 {
				return "", fmt.Errorf("field %d is no text", number)
			}
			value = string(bytes)
		}
		message = message[size:]
	}
	return value, nil
}
