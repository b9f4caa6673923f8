package entries

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
)

func many[T any](n int, v T) []T { return slices.Repeat([]T{v}, n) }

// says wants an error that names the field and the limit, or none.
func says(t *testing.T, what string, err error, field string) {
	t.Helper()
	if field == "" {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		return
	}
	e, ok := errors.AsType[*errdefs.Error](err)
	if !ok || e.Kind != errdefs.Invalid || e.Field != field || e.Limit != "262144 entries" || !strings.HasPrefix(e.Msg, field+": ") {
		t.Errorf("%s: %v", what, err)
	}
}

func TestEntriesAreCountedWithoutDecoding(t *testing.T) {
	variables := map[string]string{}
	for i := range Most {
		variables[fmt.Sprint(i)] = ""
	}
	rules := &pb.NetworkPhase{Rules: many(Most/2, &pb.NetworkRule{})}
	for name, c := range map[string]struct {
		m     proto.Message
		field string
	}{
		"none":                   {&pb.WriteBatchRequest{}, ""},
		"a large one":            {&pb.WriteBatchRequest{Files: []*pb.FileToWrite{{Data: make([]byte, 4*Most)}}}, ""},
		"text with many commas":  {&pb.WriteBatchRequest{Id: strings.Repeat(`,[{"`, Most)}, ""},
		"the most":               {&pb.WriteBatchRequest{Files: many(Most, &pb.FileToWrite{})}, ""},
		"one more":               {&pb.WriteBatchRequest{Files: many(Most+1, &pb.FileToWrite{})}, "files"},
		"strings":                {&pb.StopManyRequest{Ids: many(Most+1, "")}, "ids"},
		"packed numbers":         {&pb.ListSandboxesRequest{States: many(Most+1, pb.SandboxState_SANDBOX_STATE_RUNNING)}, "states"},
		"the most packed ones":   {&pb.ListSandboxesRequest{States: many(Most, pb.SandboxState_SANDBOX_STATE_RUNNING)}, ""},
		"a map and one argument": {&pb.StartRequest{Command: &pb.Command{Env: variables, Argv: []string{"a"}}}, "command.env"},
		"lists in lists":         {&pb.NetworkPolicy{Phases: many(3, rules)}, "phases.rules"},
	} {
		data, err := proto.Marshal(c.m)
		if err != nil {
			t.Fatal(err)
		}
		says(t, name+", binary", Wire(data, c.m.ProtoReflect().Descriptor()), c.field)
	}
	for name, c := range map[string]struct{ text, field string }{
		"none":                  {`{}`, ""},
		"the most":              {`{"files":[` + strings.Repeat(`{},`, Most-2) + `{}]}`, ""},
		"more":                  {`{"files":[` + strings.Repeat(`{},`, Most+1) + `{}]}`, "files"},
		"strings":               {`{"ids":[` + strings.Repeat(`"",`, Most+1) + `""]}`, "ids"},
		"lists":                 {`{"a":[` + strings.Repeat(`[],`, Most+1) + `[]]}`, "a"},
		"a map":                 {`{"command":{"env":{` + strings.Repeat(`"A":"",`, Most+1) + `"B":""}}}`, "command.env"},
		"text with many commas": {`{"id":"` + strings.Repeat(",[{", Most) + `"}`, ""},
		"no JSON":               {strings.Repeat(",", 2*Most), ""},
		"lists without an end":  {strings.Repeat("[", 2*Most), ""},
	} {
		says(t, name+", JSON", JSON([]byte(c.text)), c.field)
	}
}

// The largest body there is, of nothing but empty entries.
func TestCountingTakesNoMemory(t *testing.T) {
	wire := slices.Repeat(protowire.AppendTag(nil, 2, protowire.BytesType), 1<<23)
	for i := range wire {
		if i%2 == 1 {
			wire[i] = 0
		}
	}
	text := []byte(`{"files":[` + strings.Repeat(`{},`, 1<<22) + `{}]}`)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	err := Codec{}.Unmarshal(wire, &pb.WriteBatchRequest{})
	jerr := JSON(text)
	runtime.ReadMemStats(&after)
	says(t, "binary", err, "files")
	says(t, "JSON", jerr, "files")
	if took := after.TotalAlloc - before.TotalAlloc; took > 1<<20 {
		t.Errorf("%d bytes for messages of %d and %d", took, len(wire), len(text))
	}
}

func FuzzEntries(f *testing.F) {
	f.Add([]byte(`{"files":[{"path":"/x"}]}`))
	f.Add([]byte("\x12\x04\x0a\x02/x"))
	f.Fuzz(func(t *testing.T, data []byte) {
		// The bound is far above what a fuzzer makes: neither may refuse what decodes, nor break.
		left := 1 << 30
		if err := wire(data, (&pb.CreateSandboxRequest{}).ProtoReflect().Descriptor(), nil, &left); err != nil &&
			proto.Unmarshal(data, &pb.CreateSandboxRequest{}) == nil {
			t.Error(err)
		}
		if err := JSON(data); err != nil && protojson.Unmarshal(data, &pb.CreateSandboxRequest{}) == nil {
			t.Error(err)
		}
	})
}
