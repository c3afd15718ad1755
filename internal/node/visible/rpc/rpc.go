// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rpc makes the text of replies and events visible. It is apart from package visible for the
// sake of programs that start in 2 ms.
package rpc

import (
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// Error returns an error of gRPC's or ttrpc's with its text visible, its code and its details.
func Error(err error) error {
	if err == nil {
		return nil
	}
	is := status.Convert(err).Proto()
	is.Message = visible.Text(is.GetMessage())
	return status.FromProto(is).Err()
}

// Message returns a message with all its texts visible: the message itself if they are, else a copy.
func Message(m proto.Message) proto.Message {
	if m == nil || isVisible(m.ProtoReflect()) {
		return m
	}
	m = proto.Clone(m)
	show(m.ProtoReflect())
	return m
}

func isVisible(m protoreflect.Message) bool {
	all := true
	each(m, func(text string, _ func(string)) { all = all && visible.Text(text) == text })
	return all
}

func show(m protoreflect.Message) {
	each(m, func(text string, set func(string)) {
		if seen := visible.Text(text); seen != text {
			set(seen)
		}
	})
}

// each calls do with each text of a message and of those in it, and with what replaces it.
func each(m protoreflect.Message, do func(text string, set func(string))) {
	value := func(kind protoreflect.Kind, v protoreflect.Value, set func(protoreflect.Value)) {
		switch kind {
		case protoreflect.StringKind:
			do(v.String(), func(text string) { set(protoreflect.ValueOfString(text)) })
		case protoreflect.MessageKind, protoreflect.GroupKind:
			each(v.Message(), do)
		}
	}
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsList():
			for i := range v.List().Len() {
				value(field.Kind(), v.List().Get(i), func(v protoreflect.Value) { field := m.Mutable(field).List(); field.Set(i, v) })
			}
		case field.IsMap():
			v.Map().Range(func(key protoreflect.MapKey, v protoreflect.Value) bool {
				to := m.Mutable
				value(field.MapValue().Kind(), v, func(v protoreflect.Value) { to(field).Map().Set(key, v) })
				value(field.MapKey().Kind(), key.Value(), func(k protoreflect.Value) {
					entries := to(field).Map()
					entries.Set(k.MapKey(), entries.Get(key))
					entries.Clear(key)
				})
				return true
			})
		default:
			value(field.Kind(), v, func(v protoreflect.Value) { m.Set(field, v) })
		}
		return true
	})
}
