package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
)

// printJSON prints one document on one line.
func printJSON(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	_, err = fmt.Fprintln(w, string(b))
	return err
}

// document is a message of the API as JSON, with our field names and nothing left out, under a schema name.
func document(schema string, m proto.Message) (map[string]any, error) {
	b, err := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	out := map[string]any{}
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("write JSON: %w", err)
	}
	if schema != "" {
		out["schema"] = schema
	}
	return out, nil
}

// documents is a list of messages, never null.
func documents[M proto.Message](schema string, list []M) ([]map[string]any, error) {
	out := make([]map[string]any, 0, len(list))
	for _, m := range list {
		d, err := document(schema, m)
		if err != nil {
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

// printJSONError prints an error as the one line that programs read on standard error.
func printJSONError(w io.Writer, e *errdefs.Error) {
	fields := map[string]any{"kind": string(e.Kind), "message": strings.TrimSuffix(e.Error(), ". "+e.HintText()), "hint": e.HintText()}
	for name, v := range map[string]string{"object": e.Object, "field": e.Field, "limit": e.Limit, "cause": e.Cause, "feature": e.Feature} {
		if v != "" {
			fields[name] = v
		}
	}
	if len(e.Near) > 0 {
		fields["near"] = e.Near
	}
	if e.RetryAfter > 0 {
		fields["retry_after_ms"] = e.RetryAfter.Milliseconds()
	}
	_ = printJSON(w, map[string]any{"error": fields})
}
