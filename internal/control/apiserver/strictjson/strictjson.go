// Package strictjson is the JSON codec of the public door: what a message does not name, names twice or cannot hold is
// refused with the field at fault, instead of being dropped in silence. Answers use the names of the .proto files and
// show every field that is empty, lists as [].
//
// The good path is protojson alone; only a refused request is read a second time to find the field.
package strictjson

import (
	"bytes"
	"encoding/json/jsontext"
	"errors"
	"fmt"
	"io"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/control/apiserver/entries"
)

// depth is how deep a request may nest; the deepest of ours has 5 levels, an error detail in it a few more.
const depth = 64

// Codec implements connect.Codec. Register one per name: connect looks the content type's parameters up literally.
type Codec struct{ name string }

// Codecs are the codecs to register.
func Codecs() []Codec { return []Codec{{"json"}, {"json; charset=utf-8"}} }

// Name is the content type's name.
func (c Codec) Name() string { return c.name }

// Marshal writes a message.
func (Codec) Marshal(v any) ([]byte, error) { return Codec{}.MarshalAppend(nil, v) }

// MarshalAppend writes a message behind dst.
func (Codec) MarshalAppend(dst []byte, v any) ([]byte, error) {
	m, ok := v.(proto.Message)
	if !ok {
		return nil, fmt.Errorf("encode: %T is no message", v)
	}
	return protojson.MarshalOptions{UseProtoNames: true, EmitDefaultValues: true}.MarshalAppend(dst, m)
}

// Unmarshal reads a message; an error is errdefs.Invalid and names the field.
func (Codec) Unmarshal(data []byte, v any) error {
	m, ok := v.(proto.Message)
	if !ok {
		return fmt.Errorf("decode: %T is no message", v)
	}
	return Unmarshal(data, m)
}

// Check reports whether data is a message of that kind, without keeping it.
func Check(data []byte, kind protoreflect.MessageType) error {
	return Unmarshal(data, kind.New().Interface())
}

// Unmarshal reads a message; an error is errdefs.Invalid and names the field.
func Unmarshal(data []byte, m proto.Message) error {
	if len(data) == 0 {
		return invalid("", "the body is empty").WithHint("Send {} for an empty request")
	}
	if err := entries.JSON(data); err != nil {
		return err
	}
	err := protojson.UnmarshalOptions{RecursionLimit: depth}.Unmarshal(data, m)
	if err == nil {
		return nil
	}
	return explain(data, m.ProtoReflect().Descriptor(), err)
}

func invalid(field, format string, args ...any) *errdefs.Error {
	return errdefs.New(errdefs.Invalid, "", format, args...).WithField(field, "")
}

// explain finds what protojson stumbled over.
func explain(data []byte, md protoreflect.MessageDescriptor, cause error) error {
	dec := jsontext.NewDecoder(bytes.NewReader(data))
	err := message(dec, md, "", 0)
	if err == nil {
		if _, rest := dec.ReadToken(); !errors.Is(rest, io.EOF) {
			err = invalid("", "the body holds more than one value")
		}
	}
	switch e, ok := errors.AsType[*errdefs.Error](err); {
	case ok:
		return e.Wrap(cause)
	case err != nil:
		return syntax(err).Wrap(cause)
	}
	return invalid("", "the body is no %s: %s", md.FullName(), clean(cause)).Wrap(cause)
}

// syntax words an error of the JSON itself.
func syntax(err error) *errdefs.Error {
	if e, ok := errors.AsType[*jsontext.SyntacticError](err); ok {
		field := dotted(e.JSONPointer)
		if errors.Is(e.Err, jsontext.ErrDuplicateName) {
			return invalid(field, "%s: stands twice", field).WithHint("Leave one")
		}
		return invalid(field, "byte %d: %v", e.ByteOffset, e.Err).WithHint("Send valid JSON")
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return invalid("", "the body ends in the middle of a value").WithHint("Send valid JSON")
	}
	return invalid("", "the body is no JSON: %v", err).WithHint("Send valid JSON")
}

func dotted(p jsontext.Pointer) string {
	var parts []string
	for t := range p.Tokens() {
		parts = append(parts, clip(t))
	}
	return strings.Join(parts, ".")
}

// message walks an object of kind md and stops at the first field that is not of it.
func message(dec *jsontext.Decoder, md protoreflect.MessageDescriptor, path string, level int) error {
	if level > depth {
		return invalid(path, "%s: nested deeper than %d", path, depth)
	}
	if wellKnown(md) || dec.PeekKind() != '{' {
		return leaf(dec, path, func(v []byte) error {
			return protojson.UnmarshalOptions{RecursionLimit: depth}.Unmarshal(v, dynamicpb.NewMessage(md))
		})
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	seen := map[protoreflect.FullName]string{}
	for dec.PeekKind() != '}' {
		tok, err := dec.ReadToken()
		if err != nil {
			return err
		}
		name := tok.String()
		at := join(path, name)
		fd := md.Fields().ByJSONName(name)
		if fd == nil {
			fd = md.Fields().ByTextName(name)
		}
		if fd == nil {
			return invalid(at, "%s: unknown field", at).WithHint("%s", suggest(md, name))
		}
		if dec.PeekKind() != 'n' { // null sets nothing
			if first, twice := seen[fd.FullName()]; twice {
				return invalid(at, "%s: stands twice, as %s too", at, first).WithHint("Leave one")
			}
			seen[fd.FullName()] = clip(name)
			if o := fd.ContainingOneof(); o != nil && !o.IsSynthetic() {
				if first, twice := seen[o.FullName()]; twice {
					return invalid(at, "%s: goes with no %s", at, first).WithHint("Set one of the two")
				}
				seen[o.FullName()] = clip(name)
			}
		}
		if err := field(dec, fd, at, level); err != nil {
			return err
		}
	}
	_, err := dec.ReadToken()
	return err
}

func field(dec *jsontext.Decoder, fd protoreflect.FieldDescriptor, path string, level int) error {
	switch {
	case dec.PeekKind() == 'n':
		_, err := dec.ReadToken()
		return err
	case fd.IsMap():
		return object(dec, path, func(at string) error { return value(dec, fd.MapValue(), at, level) })
	case fd.IsList():
		if dec.PeekKind() != '[' {
			return leaf(dec, path, func([]byte) error { return errors.New("is no list") })
		}
		if _, err := dec.ReadToken(); err != nil {
			return err
		}
		for i := 0; dec.PeekKind() != ']'; i++ {
			if err := value(dec, fd, fmt.Sprintf("%s[%d]", path, i), level); err != nil {
				return err
			}
		}
		_, err := dec.ReadToken()
		return err
	default:
		return value(dec, fd, path, level)
	}
}

func object(dec *jsontext.Decoder, path string, each func(at string) error) error {
	if dec.PeekKind() != '{' {
		return leaf(dec, path, func([]byte) error { return errors.New("is no object") })
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	for dec.PeekKind() != '}' {
		tok, err := dec.ReadToken()
		if err != nil {
			return err
		}
		if err := each(join(path, tok.String())); err != nil {
			return err
		}
	}
	_, err := dec.ReadToken()
	return err
}

// value reads one value of a field: a list's element, a map's value or the field itself.
func value(dec *jsontext.Decoder, fd protoreflect.FieldDescriptor, path string, level int) error {
	if fd.Message() != nil {
		return message(dec, fd.Message(), path, level+1)
	}
	return leaf(dec, path, func(v []byte) error {
		// protojson knows what a scalar may look like: ask it with a message that has this one field.
		m := dynamicpb.NewMessage(fd.ContainingMessage())
		text := fmt.Appendf(nil, "{%q:%s}", fd.TextName(), v)
		if fd.IsList() {
			text = fmt.Appendf(nil, "{%q:[%s]}", fd.TextName(), v)
		}
		return protojson.Unmarshal(text, m)
	})
}

// leaf reads one value and lets ok judge it.
func leaf(dec *jsontext.Decoder, path string, ok func([]byte) error) error {
	v, err := dec.ReadValue()
	if err != nil {
		return err
	}
	if err := ok(v); err != nil {
		return invalid(path, "%s: %s cannot stand here", orBody(path), clip(string(v)))
	}
	return nil
}

func orBody(path string) string {
	if path == "" {
		return "the body"
	}
	return path
}

// wellKnown reports whether md has a JSON form of its own.
func wellKnown(md protoreflect.MessageDescriptor) bool {
	return md.FullName().Parent() == "google.protobuf"
}

func join(path, name string) string {
	if path == "" {
		return clip(name)
	}
	return path + "." + clip(name)
}

// suggest names the field that was probably meant.
func suggest(md protoreflect.MessageDescriptor, name string) string {
	var names []string
	for i := range md.Fields().Len() {
		n := md.Fields().Get(i).TextName()
		if strings.EqualFold(strings.ReplaceAll(n, "_", ""), strings.Map(func(r rune) rune {
			if r == '_' || r == '-' {
				return -1
			}
			return r
		}, name)) {
			return "Did you mean " + n + "?"
		}
		names = append(names, n)
	}
	if len(names) == 0 {
		return "This request has no fields"
	}
	return "Use one of: " + strings.Join(names, ", ")
}

// clean takes the library's prefix and its deliberately unstable space off an error.
func clean(err error) string {
	return strings.ReplaceAll(strings.TrimPrefix(strings.TrimPrefix(err.Error(), "proto:"), "\u00a0"), "\u00a0", " ")
}

func clip(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "..."
	}
	return s
}
