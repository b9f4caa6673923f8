package openapi_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/openapi"
)

const stale = "openapi.json is stale, run: go run ./api/openapi/gen"

func TestDocumentIsFresh(t *testing.T) {
	doc, err := openapi.Document(openapi.Embedded())
	if err != nil {
		t.Fatal(err)
	}
	want, err := withoutComments(doc)
	if err != nil {
		t.Fatal(err)
	}
	got, err := withoutComments(openapi.JSON)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s\n%s", stale, diff)
	}
}

func TestCommentsAreFresh(t *testing.T) {
	files, err := openapi.Commented(t.Context(), "..")
	if err != nil {
		t.Fatal(err)
	}
	want, err := openapi.Document(files)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, openapi.JSON) {
		t.Errorf("%s\n%s", stale, cmp.Diff(string(want), string(openapi.JSON)))
	}
}

// TestDocumentIsValid checks what OpenAPI 3.1 asks of a document like ours, and that every call of the API is in it.
func TestDocumentIsValid(t *testing.T) {
	var doc struct {
		OpenAPI string
		Info    struct{ Title, Version string }
		Paths   map[string]map[string]struct {
			OperationID string `json:"operationId"`
			Tags        []string
			RequestBody struct {
				Content map[string]struct{ Schema map[string]any }
			} `json:"requestBody"`
			Responses map[string]json.RawMessage
		}
		Components struct {
			Schemas         map[string]map[string]any
			SecuritySchemes map[string]any `json:"securitySchemes"`
			Parameters      map[string]any
			Responses       map[string]any
		}
		Tags     []struct{ Name string }
		Security []map[string][]string
		Servers  []any
	}
	if err := json.Unmarshal(openapi.JSON, &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || doc.Info.Title == "" || doc.Info.Version == "" {
		t.Errorf("head: %q, %+v", doc.OpenAPI, doc.Info)
	}
	tags := map[string]bool{}
	for _, tag := range doc.Tags {
		tags[tag.Name] = true
	}
	ids := map[string]bool{}
	for path, methods := range doc.Paths {
		op, ok := methods["post"]
		if !ok || len(methods) != 1 || !strings.HasPrefix(path, "/sandsea.v1.") {
			t.Errorf("%s: want one POST", path)
		}
		if op.OperationID == "" || ids[op.OperationID] {
			t.Errorf("%s: operation id %q missing or twice", path, op.OperationID)
		}
		ids[op.OperationID] = true
		if len(op.Tags) != 1 || !tags[op.Tags[0]] {
			t.Errorf("%s: tags %v", path, op.Tags)
		}
		if len(op.RequestBody.Content) != 1 || op.Responses["200"] == nil || op.Responses["default"] == nil {
			t.Errorf("%s: body or answers missing", path)
		}
	}
	for _, f := range openapi.Embedded() {
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				if p := "/" + string(s.FullName()) + "/" + string(s.Methods().Get(j).Name()); doc.Paths[p] == nil {
					t.Errorf("%s is missing", p)
				}
			}
		}
	}
	// Every reference has its target.
	var all any
	if err := json.Unmarshal(openapi.JSON, &all); err != nil {
		t.Fatal(err)
	}
	refs := 0
	var look func(v any)
	look = func(v any) {
		switch v := v.(type) {
		case []any:
			for _, e := range v {
				look(e)
			}
		case map[string]any:
			if r, ok := v["$ref"].(string); ok {
				refs++
				at := all
				for _, part := range strings.Split(strings.TrimPrefix(r, "#/"), "/") {
					m, _ := at.(map[string]any)
					at = m[part]
				}
				if at == nil {
					t.Errorf("%s leads nowhere", r)
				}
			}
			for _, e := range v {
				look(e)
			}
		}
	}
	look(all)
	if refs < 50 {
		t.Errorf("%d references only", refs)
	}
	for name, s := range doc.Components.Schemas {
		if s["type"] == nil {
			t.Errorf("schema %s has no type", name)
		}
	}
	if _, ok := doc.Components.SecuritySchemes["token"]; !ok || len(doc.Security) != 1 {
		t.Error("no security")
	}
}

func TestStripKeepsFieldsThatAreCalledDescription(t *testing.T) {
	got, err := withoutComments([]byte(`{"properties":{"description":{"description":"x","type":"string"}}}`))
	if err != nil || !strings.Contains(string(got), `"description"`) || strings.Contains(string(got), `"x"`) {
		t.Errorf("got %s, %v", got, err)
	}
}

// withoutComments is a document without the descriptions that come from comments, to compare what machines read.
func withoutComments(doc []byte) ([]byte, error) {
	var v any
	if err := json.Unmarshal(doc, &v); err != nil {
		return nil, fmt.Errorf("read the document: %w", err)
	}
	strip(v, nil)
	out, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("encode the document: %w", err)
	}
	return out, nil
}

func strip(v any, path []string) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			strip(e, append(path, "[]"))
		}
	case map[string]any:
		// A field may be called description.
		if len(path) == 0 || path[len(path)-1] != "properties" {
			if _, text := v["description"].(string); text && !slices.Equal(path, []string{"info"}) {
				delete(v, "description")
			}
		}
		for k, e := range v {
			strip(e, append(path, k))
		}
	}
}
