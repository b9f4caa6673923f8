package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// maxPolicy is the most that a file with a policy may hold.
const maxPolicy = 1 << 20

// readPolicy reads a policy from a file, TOML or JSON, "-" being standard input. It holds what --json prints as
// spec.network: the API's field names, lower-case words, RFC 3339 times or days.
func readPolicy(flag, file string) (*sandseav1.NetworkPolicy, error) {
	bad := func(object, format string, args ...any) *errdefs.Error {
		return errdefs.New(errdefs.Invalid, object, format, args...).WithField(flag, "").WithHint("Correct the file")
	}
	text, err := readLimited(file, maxPolicy)
	if err != nil {
		return nil, misuse(bad("", "--%s %s: %s", flag, ui.Text(file), rootMessage(err)).WithHint("Give another: --%s FILE", flag))
	}
	name := ui.Text(file)
	var doc any
	if trimmed := bytes.TrimSpace(text); len(trimmed) > 0 && trimmed[0] == '{' {
		if err := json.Unmarshal(text, &doc); err != nil {
			if se, ok := errors.AsType[*json.SyntaxError](err); ok {
				name = fmt.Sprintf("%s:%d", name, 1+bytes.Count(text[:min(int(se.Offset), len(text))], []byte("\n")))
			}
			return nil, misuse(bad(name, "%s", ui.Text(err.Error())))
		}
	} else {
		var tree map[string]any
		if _, err := toml.Decode(string(text), &tree); err != nil {
			msg := err.Error()
			if pe, ok := errors.AsType[toml.ParseError](err); ok {
				name, msg = fmt.Sprintf("%s:%d", name, pe.Position.Line), pe.Message
			}
			return nil, misuse(bad(name, "%s", ui.Text(msg)))
		}
		doc = tree
	}
	p := &sandseav1.NetworkPolicy{}
	fitted, e := fitMessage("", doc, p.ProtoReflect().Descriptor())
	if e != nil {
		e.Object = name
		return nil, misuse(e)
	}
	b, err := json.Marshal(fitted)
	if err == nil {
		err = protojson.Unmarshal(b, p)
	}
	if err != nil {
		return nil, misuse(bad(name, "%s", ui.Text(err.Error())).Wrap(err))
	}
	return p, nil
}

func readLimited(file string, limit int64) ([]byte, error) {
	in := os.Stdin
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = fmt.Errorf("more than %s", ui.LongSize(limit))
	}
	return b, err
}

// fitMessage makes a value from a file fit for protojson: it refuses unknown keys and wrong types with the key's path, and
// takes the words and times that our own documents have.
func fitMessage(path string, v any, d protoreflect.MessageDescriptor) (any, *errdefs.Error) {
	tree, ok := v.(map[string]any)
	if !ok {
		return nil, misfit(path, "a table with %s", keysWord(d))
	}
	out := map[string]any{}
	for key, value := range tree {
		at := strings.TrimPrefix(path+"."+key, ".")
		f := d.Fields().ByName(protoreflect.Name(key))
		if f == nil {
			f = d.Fields().ByJSONName(key)
		}
		if f == nil {
			e := errdefs.New(errdefs.Invalid, "", "unknown key %s", ui.Text(at)).WithField(at, "").WithHint("Known: %s", keysWord(d))
			if near := ui.Nearest(key, keyNames(d)); near != "" {
				e = e.WithHint("Did you mean %s?", near)
			}
			return nil, e
		}
		if value == nil {
			continue // as our own documents write what is absent
		}
		fitted, err := fitField(at, value, f)
		if err != nil {
			return nil, err
		}
		if before := sibling(f, out); before != "" {
			both := []string{string(f.Name()), before}
			slices.Sort(both)
			return nil, errdefs.New(errdefs.Invalid, "", "%s: has both %s and %s", ui.Text(cmp.Or(path, "the policy")), both[0], both[1]).
				WithField(path, "").WithHint("Make two of it")
		}
		out[string(f.Name())] = fitted
	}
	return out, nil
}

// sibling is a field that is set and excludes another one, or empty.
func sibling(f protoreflect.FieldDescriptor, set map[string]any) string {
	group := f.ContainingOneof()
	if group == nil {
		return ""
	}
	for i := range group.Fields().Len() {
		if name := string(group.Fields().Get(i).Name()); set[name] != nil && name != string(f.Name()) {
			return name
		}
	}
	return ""
}

func fitField(path string, v any, f protoreflect.FieldDescriptor) (any, *errdefs.Error) {
	switch {
	case f.IsMap():
		tree, ok := v.(map[string]any)
		if !ok {
			return nil, misfit(path, "a table")
		}
		out := map[string]any{}
		for key, value := range tree {
			fitted, err := fitOne(path+"."+key, value, f.MapValue())
			if err != nil {
				return nil, err
			}
			out[key] = fitted
		}
		return out, nil
	case f.IsList():
		list, ok := v.([]any)
		if tables, isTables := v.([]map[string]any); isTables { // as TOML gives them
			for _, t := range tables {
				list = append(list, t)
			}
			ok = true
		}
		if !ok {
			return nil, misfit(path, "a list")
		}
		out := make([]any, 0, len(list))
		for i, value := range list {
			fitted, err := fitOne(fmt.Sprintf("%s[%d]", path, i), value, f)
			if err != nil {
				return nil, err
			}
			out = append(out, fitted)
		}
		return out, nil
	}
	return fitOne(path, v, f)
}

func fitOne(path string, v any, f protoreflect.FieldDescriptor) (any, *errdefs.Error) {
	switch f.Kind() {
	case protoreflect.MessageKind:
		if f.Message().FullName() == (&timestamppb.Timestamp{}).ProtoReflect().Descriptor().FullName() {
			return fitTime(path, v)
		}
		return fitMessage(path, v, f.Message())
	case protoreflect.EnumKind:
		return fitWord(path, v, f.Enum())
	case protoreflect.BoolKind:
		if _, ok := v.(bool); !ok {
			return nil, misfit(path, "true or false")
		}
	case protoreflect.StringKind:
		if _, ok := v.(string); !ok {
			return nil, misfit(path, "text, in quotes")
		}
	default:
		n, isFloat := v.(float64)
		whole, isInt := v.(int64)
		if !isInt && (!isFloat || n != math.Trunc(n)) {
			return nil, misfit(path, "a whole number")
		}
		if isInt {
			n = float64(whole)
		}
		if most := largest(f.Kind()); math.Abs(n) > most {
			return nil, misfit(path, "a whole number, at most %.0f", most)
		}
	}
	return v, nil
}

// largest is the largest whole number that a field of a kind holds, of those that are exact in JSON.
func largest(k protoreflect.Kind) float64 {
	if k == protoreflect.Int32Kind {
		return math.MaxInt32
	}
	return 1 << 53
}

func fitTime(path string, v any) (any, *errdefs.Error) {
	switch t := v.(type) {
	case time.Time:
		if strings.HasSuffix(t.Location().String(), "-local") { // TOML's dates without a zone
			t = time.Date(t.Year(), t.Month(), t.Day(), t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), time.UTC)
		}
		return t.UTC().Format(time.RFC3339Nano), nil
	case string:
		if moment, err := parseAsOf(t); err == nil && moment != nil {
			return moment.AsTime().Format(time.RFC3339Nano), nil
		}
	}
	return nil, misfit(path, "a date, as 2024-06-01 or 2024-06-01T12:00:00Z")
}

func fitWord(path string, v any, d protoreflect.EnumDescriptor) (any, *errdefs.Error) {
	word, _ := v.(string)
	var known []string
	for i := range d.Values().Len() {
		value := d.Values().Get(i)
		short := enumWord(d, value.Number())
		if word == short || word == string(value.Name()) {
			return string(value.Name()), nil
		}
		if value.Number() != 0 {
			known = append(known, short)
		}
	}
	return nil, misfit(path, "%s", strings.Join(known, " or "))
}

func misfit(path, format string, args ...any) *errdefs.Error {
	if path == "" {
		path = "the policy"
	}
	return errdefs.New(errdefs.Invalid, "", "%s: must be %s", ui.Text(path), fmt.Sprintf(format, args...)).WithField(path, "").
		WithHint("Correct the file")
}

func keyNames(d protoreflect.MessageDescriptor) (out []string) {
	for i := range d.Fields().Len() {
		out = append(out, string(d.Fields().Get(i).Name()))
	}
	return out
}

func keysWord(d protoreflect.MessageDescriptor) string {
	names := keyNames(d)
	slices.Sort(names)
	return strings.Join(names, ", ")
}
