// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/reflect/protoreflect"
)

//go:embed fields.txt
var fieldsText string

// A field's value is one of these, see fields.txt.
const (
	Any     = "any"     // nobody outside of the container is the worse for any value
	Ruled   = "rule"    // package admission compares it with the spec
	In      = "in"      // one of some numbers
	Bits    = "bits"    // some bits
	Most    = "max"     // a number up to another
	Like    = "like"    // a text of a form
	Dropped = "dropped" // CRIU does not get it
	Refused = "refused" // a restore never needs it
)

// Field is what is known of one field of CRIU's images.
type Field struct {
	// May is one of the words above.
	May string
	// Numbers are those of In, and the bound of Bits and Most.
	Numbers []uint64
	// Form is that of Like.
	Form *regexp.Regexp
	// Why is the reason of fields.txt; of Ruled the name of the rule.
	Why string
}

// Fields returns what fields.txt says of all fields, by the names of messages and fields. It
// is read once; an error in it is one of the program's.
var Fields = sync.OnceValue(func() map[protoreflect.FullName]Field {
	fields := make(map[protoreflect.FullName]Field, strings.Count(fieldsText, "\n"))
	message := ""
	for n, line := range strings.Split(fieldsText, "\n") {
		words := strings.Fields(line)
		switch {
		case len(words) == 0 || strings.HasPrefix(words[0], "#"):
			continue
		case !strings.HasPrefix(line, "\t"):
			message = words[0]
			continue
		}
		f, err := parseField(words[1:])
		name := protoreflect.FullName(message + "." + words[0])
		if _, twice := fields[name]; err != nil || twice {
			panic(fmt.Sprintf("fields.txt:%d: %v (%v)", n+1, err, twice))
		}
		fields[name] = f
	}
	return fields
})

func parseField(words []string) (f Field, err error) {
	if len(words) == 0 {
		return f, fmt.Errorf("a field without a word")
	}
	f.May, words = words[0], words[1:]
	switch f.May {
	case In, Bits, Most:
		if len(words) == 0 {
			return f, fmt.Errorf("%s without a number", f.May)
		}
		for text := range strings.SplitSeq(words[0], ",") {
			number, err := strconv.ParseUint(text, 0, 64)
			if err != nil {
				return f, err
			}
			f.Numbers = append(f.Numbers, number)
		}
		words = words[1:]
	case Like:
		if len(words) == 0 {
			return f, fmt.Errorf("%s without a pattern", f.May)
		}
		if f.Form, err = regexp.Compile(words[0]); err != nil {
			return f, err
		}
		words = words[1:]
	case Any, Ruled, Dropped, Refused:
	default:
		return f, fmt.Errorf("unknown word %q", f.May)
	}
	f.Why = strings.Join(words, " ")
	if f.Why == "" {
		return f, fmt.Errorf("%s without a reason", f.May)
	}
	return f, nil
}

// Warm looks up what each reader of images needs: the list, and what protobuf knows of the entries. It takes a
// millisecond, beside CRIU or whatever else comes before an image; with deep, what is inside the entries too, and
// three.
func Warm(deep bool) {
	Fields()
	magics()
	done := make(map[protoreflect.FullName]bool)
	for _, k := range Kinds() {
		if k.entry != nil {
			warm(k.New(0).ProtoReflect(), deep, done)
		}
	}
}

func warm(m protoreflect.Message, deep bool, done map[protoreflect.FullName]bool) {
	if done[m.Descriptor().FullName()] {
		return
	}
	done[m.Descriptor().FullName()] = true
	_ = check(m)
	for i, fields := 0, m.Descriptor().Fields(); deep && i < fields.Len(); i++ {
		switch fd := fields.Get(i); {
		case fd.Message() == nil:
		case fd.IsList():
			warm(m.NewField(fd).List().NewElement().Message(), deep, done)
		default:
			warm(m.NewField(fd).Message(), deep, done)
		}
	}
}

// check refuses a message with a field that is not on the list, or a value that the list does
// not allow. It names that of the lowest number: Range has an order of its own in each program. It takes
// away what CRIU does not get.
func check(m protoreflect.Message) (err error) {
	if unknown := m.GetUnknown(); len(unknown) > 0 && !Without("unknown fields") {
		return fmt.Errorf("%s has a field or a value that gpuckpt does not know (%d bytes)", m.Descriptor().FullName(), len(unknown))
	}
	var first protoreflect.FieldNumber
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if ferr := checkField(m, fd, v); ferr != nil && (err == nil || fd.Number() < first) {
			err, first = ferr, fd.Number()
		}
		return true
	})
	return err
}

func checkField(m protoreflect.Message, fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	f, known := Fields()[fd.FullName()]
	switch {
	case Without(string(fd.FullName())):
	case !known:
		return fmt.Errorf("%s: gpuckpt does not know this field", fd.FullName())
	case f.May == Dropped:
		m.Clear(fd)
	case f.May == Refused:
		return fmt.Errorf("%s: a restore does without it (%s)", fd.FullName(), f.Why)
	case !fd.IsList():
		return f.check(fd, v)
	case f.checks() || compound(fd):
		for i, list := 0, v.List(); i < list.Len(); i++ {
			if err := f.check(fd, list.Get(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// checks reports whether the list says something of a number.
func (f Field) checks() bool { return len(f.Numbers) > 0 }

// compound reports whether a value of a field can be wrong by itself.
func compound(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.MessageKind || fd.Kind() == protoreflect.StringKind
}

func (f Field) check(fd protoreflect.FieldDescriptor, v protoreflect.Value) error {
	switch fd.Kind() {
	case protoreflect.MessageKind:
		return check(v.Message())
	case protoreflect.StringKind:
		if strings.Contains(v.String(), "\x00") {
			return fmt.Errorf("%s: %q has a NUL", fd.FullName(), v.String())
		}
		if f.Form != nil && !f.Form.MatchString(v.String()) {
			return fmt.Errorf("%s: %q is not what a restore needs (%s)", fd.FullName(), v.String(), f.Why)
		}
		return nil
	}
	if !f.checks() {
		return nil
	}
	n, ok := number(fd, v)
	switch {
	case !ok:
	case f.May == In && slices.Contains(f.Numbers, n), f.May == Bits && n&^f.Numbers[0] == 0, f.May == Most && n <= f.Numbers[0]:
		return nil
	}
	what := strconv.FormatUint(n, 10)
	if fd.Kind() == protoreflect.EnumKind {
		if value := fd.Enum().Values().ByNumber(v.Enum()); value != nil {
			what = string(value.Name()) // PACKETSK
		}
	}
	return fmt.Errorf("%s: %s is not what a restore needs (%s)", fd.FullName(), what, f.Why)
}

// number returns a value as a number; negative ones are huge.
func number(fd protoreflect.FieldDescriptor, v protoreflect.Value) (uint64, bool) {
	switch fd.Kind() {
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind, protoreflect.Fixed32Kind:
		return v.Uint(), true
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Int64Kind, protoreflect.Sint64Kind:
		return uint64(v.Int()), true
	case protoreflect.EnumKind:
		return uint64(v.Enum()), true
	case protoreflect.BoolKind:
		if v.Bool() {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}
