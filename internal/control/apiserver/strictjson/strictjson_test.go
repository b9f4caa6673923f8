package strictjson_test

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/control/apiserver/strictjson"
)

func codec() strictjson.Codec { return strictjson.Codecs()[0] }

func TestRefusesWithTheFieldAtFault(t *testing.T) {
	for _, tc := range []struct{ name, body, field, text string }{
		{"an unknown field", `{"spek":{}}`, "spek", "spek: unknown field. Use one of: spec, key, ready_timeout_ms"},
		{
			"a misspelt deep field", `{"spec":{"limits":{"memory-bytes":1}}}`, "spec.limits.memory-bytes",
			"spec.limits.memory-bytes: unknown field. Did you mean memory_bytes?",
		},
		{"a duplicate", `{"key":"a","key":"b"}`, "key", "key: stands twice. Leave one"},
		{
			"a duplicate in two spellings", `{"ready_timeout_ms":1,"readyTimeoutMs":2}`, "readyTimeoutMs",
			"readyTimeoutMs: stands twice, as ready_timeout_ms too. Leave one",
		},
		{
			"a duplicate in a map", `{"spec":{"labels":{"a":"1","a":"2"}}}`, "spec.labels.a",
			"spec.labels.a: stands twice. Leave one",
		},
		{
			"a text for a number", `{"spec":{"limits":{"pids":"many"}}}`, "spec.limits.pids",
			`spec.limits.pids: "many" cannot stand here. Correct the request`,
		},
		{
			"a number beyond its type", `{"spec":{"limits":{"pids":1e400}}}`, "spec.limits.pids",
			`spec.limits.pids: 1e400 cannot stand here. Correct the request`,
		},
		{
			"an overflow", `{"spec":{"limits":{"memory_bytes":9223372036854775808}}}`, "spec.limits.memory_bytes",
			`spec.limits.memory_bytes: 9223372036854775808 cannot stand here. Correct the request`,
		},
		{
			"a fraction", `{"spec":{"attempt":1.5}}`, "spec.attempt",
			`spec.attempt: 1.5 cannot stand here. Correct the request`,
		},
		{
			"a bare NaN", `{"spec":{"attempt":NaN}}`, "spec.attempt",
			`byte 19: invalid character 'N' at start of value. Send valid JSON`,
		},
		{
			"an unknown enum", `{"spec":{"backend":"BACKEND_MOON"}}`, "spec.backend",
			`spec.backend: "BACKEND_MOON" cannot stand here. Correct the request`,
		},
		{
			"an object for a list", `{"spec":{"require":{}}}`, "spec.require",
			`spec.require: {} cannot stand here. Correct the request`,
		},
		{
			"a wrong element", `{"spec":{"require":["a",7]}}`, "spec.require[1]",
			`spec.require[1]: 7 cannot stand here. Correct the request`,
		},
		{
			"a wrong value of a map", `{"spec":{"network":{"services":{"pypi":"yes"}}}}`, "spec.network.services.pypi",
			`spec.network.services.pypi: "yes" cannot stand here. Correct the request`,
		},
		{"a list for the body", `[]`, "", `the body: [] cannot stand here. Correct the request`},
		{"no body", ``, "", `the body is empty. Send {} for an empty request`},
		{"half a body", `{"key":"a`, "key", `byte 9: unexpected EOF. Send valid JSON`},
		{"two bodies", `{} {}`, "", `the body holds more than one value. Correct the request`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var m sandseav1.CreateSandboxRequest
			err := codec().Unmarshal([]byte(tc.body), &m)
			e, ok := errors.AsType[*errdefs.Error](err)
			if !ok || e.Kind != errdefs.Invalid {
				t.Fatalf("got %v, want Invalid", err)
			}
			if e.Field != tc.field || e.Error() != tc.text {
				t.Errorf("\ngot  %q %s\nwant %q %s", e.Field, e.Error(), tc.field, tc.text)
			}
		})
	}
}

func TestOneofTakesOne(t *testing.T) {
	var m sandseav1.ImportImageRequest
	err := codec().Unmarshal([]byte(`{"debian":{},"archive":{}}`), &m)
	if e, ok := errors.AsType[*errdefs.Error](err); !ok || e.Field != "archive" {
		t.Errorf("got %v", err)
	}
}

func TestBombsAreRefusedQuickly(t *testing.T) {
	for name, body := range map[string]string{
		"depth 10,000 in a list":       `{"spec":` + strings.Repeat("[", 10000) + strings.Repeat("]", 10000) + `}`,
		"depth 10,000 in an object":    strings.Repeat(`{"spec":`, 10000) + "1" + strings.Repeat("}", 10000),
		"a million unknown fields":     `{` + strings.Repeat(`"x":1,`, 1<<20) + `"y":1}`,
		"a name of a mebibyte":         `{"` + strings.Repeat("x", 1<<20) + `":1}`,
		"invalid UTF-8":                "{\"key\":\"\xff\xfe\"}",
		"a lone surrogate":             `{"key":"\ud800"}`,
		"a NUL behind the body":        "{}\x00",
		"a byte order mark before it":  "\ufeff{}",
		"a comment":                    `{/* */}`,
		"a digit with a leading zero":  `{"ready_timeout_ms":01}`,
		"a hexadecimal number":         `{"ready_timeout_ms":0x1}`,
		"single quotes":                `{'key':'a'}`,
		"a trailing comma":             `{"key":"a",}`,
		"a text of 1 MiB for a number": `{"ready_timeout_ms":"` + strings.Repeat("9", 1<<20) + `"}`,
	} {
		var m sandseav1.CreateSandboxRequest
		err := codec().Unmarshal([]byte(body), &m)
		if !errors.Is(err, errdefs.Invalid) {
			t.Errorf("%s: got %v, want Invalid", name, err)
		} else if len(err.Error()) > 1000 {
			t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
		}
	}
}

func TestAcceptsWhatProtoJSONAllows(t *testing.T) {
	for _, body := range []string{
		`{}`, ` {"spec":null} `, `{"spec":{"idle_ms":"5","ttlMs":5}}`, `{"ready_timeout_ms":1e3}`,
		`{"spec":{"backend":1}}`, `{"spec":{"backend":"BACKEND_CONTAINER"}}`,
	} {
		var m sandseav1.CreateSandboxRequest
		if err := codec().Unmarshal([]byte(body), &m); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestAnswersUseProtoNamesAndShowEmptyLists(t *testing.T) {
	b, err := codec().Marshal(&sandseav1.ListSandboxesResponse{})
	if err != nil {
		t.Fatal(err)
	}
	got := strings.ReplaceAll(string(b), " ", "")
	if want := `{"sandboxes":[],"next_page_token":"","view_age_ms":"0","total":"0"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func FuzzUnmarshal(f *testing.F) {
	for _, s := range []string{
		`{"spec":{"limits":{"pids":1}}}`, `{"key":"a","key":"b"}`, `{"spec":{"labels":{"a":"b"}}}`, `[`, `{"a":[{}]}`,
		`{"spec":{"x":1}}`,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var m sandseav1.CreateSandboxRequest
		if err := codec().Unmarshal([]byte(body), &m); err != nil {
			if !errors.Is(err, errdefs.Invalid) {
				t.Errorf("%q: got %v, want Invalid", body, err)
			}
			return
		}
		// What is accepted comes back the same.
		b, err := codec().Marshal(&m)
		if err != nil {
			t.Fatalf("%q: %v", body, err)
		}
		var again sandseav1.CreateSandboxRequest
		if err := codec().Unmarshal(b, &again); err != nil || !proto.Equal(&m, &again) {
			t.Errorf("%q became %s: %v", body, b, err)
		}
	})
}
