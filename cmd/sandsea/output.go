package main

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// printJSON prints one document on one line.
func printJSON(w io.Writer, v any) error {
	b, err := encode(v)
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// encode leaves < and > as they are: nobody puts this into a web page unescaped.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return []byte(harmless(strings.TrimSuffix(b.String(), "\n"))), nil
}

// harmless writes what a terminal could obey as JSON escapes, which means the same to programs.
func harmless(text string) string {
	if !strings.ContainsFunc(text, ui.Hostile) {
		return text
	}
	var b strings.Builder
	for _, r := range text {
		switch high, low := utf16.EncodeRune(r); {
		case !ui.Hostile(r):
			b.WriteRune(r)
		case r > 0xffff:
			fmt.Fprintf(&b, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&b, `\u%04x`, r)
		}
	}
	return b.String()
}

// object is a JSON object whose members keep their order.
type object []member

type member struct {
	name  string
	value any
}

// set replaces a member or adds it at the end.
func (o *object) set(name string, value any) {
	if i := slices.IndexFunc(*o, func(m member) bool { return m.name == name }); i >= 0 {
		(*o)[i].value = value
		return
	}
	*o = append(*o, member{name, value})
}

// setBytes sets NAME to bytes that are text, and NAME_base64 to others.
func (o *object) setBytes(name string, b []byte) {
	if utf8.Valid(b) {
		o.set(name, string(b))
		return
	}
	o.set(name+"_base64", base64.StdEncoding.EncodeToString(b))
}

// MarshalJSON writes the members in their order.
func (o object) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, m := range o {
		if i > 0 {
			b = append(b, ',')
		}
		name, err := encode(m.name)
		if err != nil {
			return nil, err
		}
		value, err := encode(m.value)
		if err != nil {
			return nil, err
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}

// document is a message of the API under a schema name, with our field names and nothing left out: absent messages are
// null, lists never are, enums are lower-case words, numbers are numbers, and times are RFC 3339 in UTC.
func document(schema string, m proto.Message) object {
	out := object{{"schema", schema}}
	return append(out, members(m.ProtoReflect())...)
}

// documents is a list of messages, never null.
func documents[M proto.Message](schema string, list []M) []object {
	out := make([]object, 0, len(list))
	for _, m := range list {
		out = append(out, document(schema, m))
	}
	return out
}

func members(m protoreflect.Message) object {
	fields := m.Descriptor().Fields()
	out := make(object, 0, fields.Len())
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.ContainingOneof() != nil && !m.Has(f) {
			continue
		}
		out = append(out, member{string(f.Name()), field(m, f)})
	}
	return out
}

func field(m protoreflect.Message, f protoreflect.FieldDescriptor) any {
	v := m.Get(f)
	switch {
	case f.IsList():
		list := make([]any, 0, v.List().Len())
		for i := range v.List().Len() {
			list = append(list, single(f, v.List().Get(i)))
		}
		return list
	case f.IsMap():
		return mapping(f, v.Map())
	case f.Message() != nil && !m.Has(f):
		return nil
	}
	return single(f, v)
}

func mapping(f protoreflect.FieldDescriptor, m protoreflect.Map) object {
	byName := map[string]any{}
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		byName[k.String()] = single(f.MapValue(), v)
		return true
	})
	out := object{}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		out = append(out, member{name, byName[name]})
	}
	return out
}

func single(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.MessageKind:
		if t, ok := v.Message().Interface().(*timestamppb.Timestamp); ok {
			return t.AsTime().UTC().Format(time.RFC3339Nano)
		}
		return members(v.Message())
	case protoreflect.EnumKind:
		return enumWord(f.Enum(), v.Enum())
	}
	return v.Interface() // bytes become base64
}

// enumWord is "running" for SANDBOX_STATE_RUNNING. A value that this version does not know is its number.
func enumWord(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	if v == nil {
		return fmt.Sprint(n)
	}
	prefix := strings.TrimSuffix(string(d.Values().ByNumber(0).Name()), "UNSPECIFIED")
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
}
