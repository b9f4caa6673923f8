// Package openapi holds the OpenAPI document of the public API, made by our own walk over the protobuf descriptors:
// every call is a POST of JSON. The document is openapi.json, made anew by `go run ./api/openapi/gen`; a test fails
// when it is stale. Nothing here is needed at run time but the document itself.
package openapi

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// JSON is the document.
//
//go:embed openapi.json
var JSON []byte

// Embedded are the descriptors that are compiled in. They have no comments.
func Embedded() []protoreflect.FileDescriptor {
	return []protoreflect.FileDescriptor{
		sandseav1.File_sandsea_v1_sandbox_proto, sandseav1.File_sandsea_v1_process_proto,
		sandseav1.File_sandsea_v1_file_proto,
		sandseav1.File_sandsea_v1_image_proto, sandseav1.File_sandsea_v1_node_proto, sandseav1.File_sandsea_v1_error_proto,
	}
}

// Commented reads the .proto files below dir (the folder api) with the pinned buf, comments and all.
func Commented(ctx context.Context, dir string) ([]protoreflect.FileDescriptor, error) {
	var names []string
	for _, f := range Embedded() {
		names = append(names, f.Path())
	}
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "../tools/run.sh", "buf", "build", "--as-file-descriptor-set", "-o", "-")
	cmd.Dir, cmd.Stderr = dir, &stderr
	raw, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("buf: %w: %s", err, bytes.TrimSpace(stderr.Bytes()))
	}
	var set descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(raw, &set); err != nil {
		return nil, fmt.Errorf("read what buf wrote: %w", err)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		return nil, fmt.Errorf("read what buf wrote: %w", err)
	}
	return find(files, names)
}

func find(files *protoregistry.Files, names []string) ([]protoreflect.FileDescriptor, error) {
	var out []protoreflect.FileDescriptor
	for _, n := range names {
		f, err := files.FindFileByPath(n)
		if err != nil {
			return nil, fmt.Errorf("find %s: %w", n, err)
		}
		out = append(out, f)
	}
	return out, nil
}

type object = map[string]any

// Document is the OpenAPI document for the services in files.
func Document(files []protoreflect.FileDescriptor) ([]byte, error) {
	w := walk{schemas: object{}}
	paths := object{}
	var tags []any
	for _, f := range files {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			tags = append(tags, described(object{"name": string(s.Name())}, s))
			for j := range s.Methods().Len() {
				m := s.Methods().Get(j)
				paths[fmt.Sprintf("/%s/%s", s.FullName(), m.Name())] = object{"post": w.operation(s, m)}
			}
		}
	}
	w.schemas["sandsea.v1.ErrorDetail"] = w.message(sandseav1.File_sandsea_v1_error_proto.Messages().ByName("ErrorDetail"))
	for _, f := range files {
		if d := f.Messages().ByName("ErrorDetail"); d != nil {
			w.schemas["sandsea.v1.ErrorDetail"] = w.message(d) // with its comments, if there are any
		}
	}
	w.schemas["Error"] = errorSchema()
	doc := object{
		"openapi": "3.1.0",
		"info": object{
			"title": "Sandsea", "version": "v1", "license": object{"name": "Apache-2.0", "identifier": "Apache-2.0"},
			"description": "Each call is a POST of one JSON object. Unknown and duplicate fields are refused with the field's " +
				"name. " +
				"64-bit numbers are written as strings and read as either. Calls that stream use the Connect protocol's frames " +
				"(application/connect+json): one byte of flags, four bytes of length, JSON; the last frame has the flag 2 and " +
				"holds " +
				"the error, if any. The same port speaks Connect, gRPC and gRPC-Web.",
		},
		"servers":  []any{object{"url": "http://127.0.0.1:7070"}},
		"security": []any{object{"token": []any{}}},
		"tags":     tags,
		"paths":    paths,
		"components": object{
			"schemas": w.schemas,
			"securitySchemes": object{
				"token": object{"type": "http", "scheme": "bearer", "description": "A token as in DIR/admin.token, sst_…"},
			},
			"parameters": object{
				"Project": object{
					"name": "Sandsea-Project", "in": "header", "required": false, "schema": object{"type": "string"},
					"description": "Work in this project, one that the token covers, instead of the token's own.",
				},
			},
			"responses": object{
				"Error": object{
					"description": "The call failed. details[0].value is a sandsea.v1.ErrorDetail.",
					"headers": object{"Sandsea-Request": object{
						"description": "The request's id, as in the server's log.", "schema": object{"type": "string"},
					}},
					"content": object{"application/json": object{"schema": ref("Error")}},
				},
			},
		},
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		return nil, fmt.Errorf("encode the document: %w", err)
	}
	return b.Bytes(), nil
}

func errorSchema() object {
	return object{
		"type": "object", "required": []any{"code"},
		"properties": object{
			"code":    object{"type": "string", "description": "The Connect code, as not_found."},
			"message": object{"type": "string", "description": "One sentence: what it is about, what happened, what to do."},
			"details": object{"type": "array", "items": object{
				"type": "object",
				"properties": object{
					"type":  object{"type": "string", "const": "sandsea.v1.ErrorDetail"},
					"value": object{"type": "string", "contentEncoding": "base64", "description": "The message in binary."},
					"debug": ref("sandsea.v1.ErrorDetail"),
				},
			}},
		},
	}
}

func ref(name string) object { return object{"$ref": "#/components/schemas/" + name} }

// walk collects the schemas of what it meets.
type walk struct{ schemas object }

func (w walk) operation(s protoreflect.ServiceDescriptor, m protoreflect.MethodDescriptor) object {
	in, out := w.visit(m.Input()), w.visit(m.Output())
	inType, outType := "application/json", "application/json"
	op := object{
		"operationId": fmt.Sprintf("%s.%s", s.Name(), m.Name()),
		"tags":        []any{string(s.Name())},
		"parameters":  []any{object{"$ref": "#/components/parameters/Project"}},
	}
	switch {
	case m.IsStreamingClient():
		op["x-streaming"] = "client"
	case m.IsStreamingServer():
		op["x-streaming"] = "server"
	}
	if op["x-streaming"] != nil {
		inType, outType = "application/connect+json", "application/connect+json"
	}
	op["requestBody"] = object{"required": true, "content": object{inType: object{"schema": in}}}
	op["responses"] = object{
		"200":     object{"description": "The answer.", "content": object{outType: object{"schema": out}}},
		"default": object{"$ref": "#/components/responses/Error"},
	}
	return described(op, m)
}

// visit gives a reference to a message's schema and makes the schema when it is new.
func (w walk) visit(m protoreflect.MessageDescriptor) object {
	if m.FullName() == "google.protobuf.Timestamp" {
		return object{"type": "string", "format": "date-time"}
	}
	name := string(m.FullName())
	if w.schemas[name] == nil {
		w.schemas[name] = object{} // breaks cycles
		w.schemas[name] = w.message(m)
	}
	return ref(name)
}

func (w walk) message(m protoreflect.MessageDescriptor) object {
	out := object{"type": "object", "additionalProperties": false}
	properties := object{}
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		schema := w.field(f)
		if o := f.ContainingOneof(); o != nil && !o.IsSynthetic() {
			var others []string
			for j := range o.Fields().Len() {
				if n := o.Fields().Get(j).TextName(); n != f.TextName() {
					others = append(others, n)
				}
			}
			schema["x-excludes"] = others
		}
		properties[f.TextName()] = described(schema, f)
	}
	if len(properties) > 0 {
		out["properties"] = properties
	}
	return described(out, m)
}

func (w walk) field(f protoreflect.FieldDescriptor) object {
	switch {
	case f.IsMap():
		return object{"type": "object", "additionalProperties": w.value(f.MapValue())}
	case f.IsList():
		return object{"type": "array", "items": w.value(f)}
	}
	return w.value(f)
}

func (w walk) value(f protoreflect.FieldDescriptor) object {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return w.visit(f.Message())
	case protoreflect.EnumKind:
		name := string(f.Enum().FullName())
		if w.schemas[name] == nil {
			var values []any
			for i := range f.Enum().Values().Len() {
				values = append(values, string(f.Enum().Values().Get(i).Name()))
			}
			w.schemas[name] = described(object{"type": "string", "enum": values}, f.Enum())
		}
		return ref(name)
	case protoreflect.BoolKind:
		return object{"type": "boolean"}
	case protoreflect.StringKind:
		return object{"type": "string"}
	case protoreflect.BytesKind:
		return object{"type": "string", "contentEncoding": "base64"}
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return object{"type": []any{"string", "integer"}, "format": "int64", "pattern": "^-?[0-9]+$"}
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return object{"type": []any{"string", "integer"}, "format": "uint64", "pattern": "^[0-9]+$", "minimum": 0}
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return object{"type": "integer", "format": "uint32", "minimum": 0}
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return object{"type": "number"}
	default:
		return object{"type": "integer", "format": "int32"}
	}
}

// described adds the comment above d, as one paragraph per blank line.
func described(o object, d protoreflect.Descriptor) object {
	text := d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments
	var paragraphs []string
	for p := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if p = strings.Join(strings.Fields(p), " "); p != "" {
			paragraphs = append(paragraphs, p)
		}
	}
	if len(paragraphs) > 0 {
		o["description"] = strings.Join(paragraphs, "\n\n")
	}
	return o
}
