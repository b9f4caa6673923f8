// Package entries bounds how many entries the lists and maps of a request have in all, before the request is decoded: an
// empty entry is two bytes on the wire and a hundred in memory. What is no valid message otherwise is left for the
// decoder to say. Safe for concurrent use.
package entries

import (
	"bytes"
	"encoding/json/jsontext"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sandsea/sandsea/api/errdefs"
)

// Most is how many entries all lists and maps of a request may have together: as many as a command may have arguments.
const Most = 1 << 18

// depth is how deep messages may nest; the deepest of ours has 5 levels.
const depth = 64

func tooMany(field string) error {
	return errdefs.New(errdefs.Invalid, "", "%s: with it the request has more than %d entries in its lists and maps", field, Most).
		WithField(field, fmt.Sprintf("%d entries", Most)).WithHint("Make several calls")
}

// JSON counts the elements of all arrays and the members of all objects; the field of an error is the one in which the
// count was passed.
func JSON(data []byte) error {
	if bytes.Count(data, []byte{','})+bytes.Count(data, []byte{'['})+bytes.Count(data, []byte{'{'}) <= Most {
		return nil
	}
	dec := jsontext.NewDecoder(bytes.NewBuffer(data), jsontext.AllowDuplicateNames(true))
	for n := 0; ; {
		t, err := dec.ReadToken()
		if err != nil {
			return nil //nolint:nilerr // the end, or what the decoder is to say
		}
		kind, length := dec.StackIndex(dec.StackDepth())
		opens := t.Kind() == '[' || t.Kind() == '{'
		if element, member := kind == '[', kind == '{' && length%2 == 0; !opens && (element || member) {
			n++
		}
		if n > Most {
			return tooMany(named(dec.StackPointer().Parent()))
		}
	}
}

// named is a pointer as people write fields, without the numbers of elements.
func named(p jsontext.Pointer) string {
	var out []byte
	for t := range p.Tokens() {
		if t == "" || t[0] >= '0' && t[0] <= '9' {
			continue
		}
		if len(out) > 0 {
			out = append(out, '.')
		}
		out = append(out, t[:min(len(t), 64)]...)
	}
	if len(out) == 0 {
		return "the body"
	}
	return string(bytes.ToValidUTF8(out, nil))
}

// Wire counts the entries of all lists and maps of a message of that kind in its binary form; the field of an error is the
// one in which the count was passed.
func Wire(data []byte, kind protoreflect.MessageDescriptor) error {
	if len(data) <= Most {
		return nil
	}
	left := Most
	return wire(data, kind, make([]string, 0, depth+1), &left)
}

func wire(data []byte, kind protoreflect.MessageDescriptor, path []string, left *int) error {
	if len(path) > depth {
		return errdefs.New(errdefs.Invalid, "", "%s: nested deeper than %d", path[0], depth).WithField(path[0], "")
	}
	for len(data) > 0 {
		number, form, n := protowire.ConsumeTag(data)
		if n < 0 {
			return nil
		}
		data = data[n:]
		if n = protowire.ConsumeFieldValue(number, form, data); n < 0 {
			return nil
		}
		value := data[:n]
		data = data[n:]
		fd := kind.Fields().ByNumber(number)
		if fd == nil {
			continue
		}
		var inside []byte
		if form == protowire.BytesType {
			inside, _ = protowire.ConsumeBytes(value)
		}
		if fd.Cardinality() == protoreflect.Repeated {
			if *left -= elements(fd, form, inside); *left < 0 {
				return tooMany(dotted(path, fd))
			}
		}
		if fd.Message() != nil && form == protowire.BytesType {
			if err := wire(inside, fd.Message(), append(path, fd.TextName()), left); err != nil {
				return err
			}
		}
	}
	return nil
}

// elements counts what one occurrence of a repeated field adds. Numbers may be packed into one.
func elements(fd protoreflect.FieldDescriptor, form protowire.Type, inside []byte) int {
	if form != protowire.BytesType {
		return 1
	}
	switch fd.Kind() {
	case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind, protoreflect.GroupKind:
		return 1
	case protoreflect.Fixed32Kind, protoreflect.Sfixed32Kind, protoreflect.FloatKind:
		return len(inside) / 4
	case protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind, protoreflect.DoubleKind:
		return len(inside) / 8
	}
	n := 0
	for _, b := range inside {
		if b < 0x80 { // the last byte of a number
			n++
		}
	}
	return n
}

func dotted(path []string, fd protoreflect.FieldDescriptor) string {
	out := ""
	for _, p := range path {
		out += p + "."
	}
	return out + fd.TextName()
}

// Codec is connect's codec for binary messages with the bound.
type Codec struct{}

// Name is the content type's name.
func (Codec) Name() string { return "proto" }

// Marshal writes a message.
func (c Codec) Marshal(v any) ([]byte, error) { return c.MarshalAppend(nil, v) }

// MarshalAppend writes a message behind dst.
func (Codec) MarshalAppend(dst []byte, v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("encode: %T is no message", v)
	}
	return proto.MarshalOptions{}.MarshalAppend(dst, m)
}

// Unmarshal reads a message; too many entries are errdefs.Invalid.
func (Codec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("decode: %T is no message", v)
	}
	if err := Wire(data, m.ProtoReflect().Descriptor()); err != nil {
		return err
	}
	return proto.Unmarshal(data, m)
}
