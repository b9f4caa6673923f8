package sandbox

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
)

// Digest is the canonical digest of a request that an idempotency key stands for: over the operation's name and its
// parts, each with its length, so that no two lists of parts give the same bytes. Callers leave out what the record of
// the first call decides anyway: deadlines, output limits, notes. 64 hex digits.
func Digest(op string, parts ...[]byte) string {
	h := sha256.New()
	var n [8]byte
	write := func(p []byte) {
		binary.BigEndian.PutUint64(n[:], uint64(len(p)))
		h.Write(n[:])
		h.Write(p)
	}
	write([]byte(op))
	for _, p := range parts {
		write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// Digest is the digest of a create with this spec as the caller wrote it, before Validate fills defaults: they may
// change between versions, and a retry across an upgrade is still the same request. Fields with their zero value leave
// no trace for the same reason: a field that a later version adds changes no digest of those who do not set it.
//
// A service that is rejected by name leaves a trace only where a rule could allow it: elsewhere not allowed and not named
// are the same request. A variable or label that is set to nothing is not one that is not set, and leaves a trace.
func (s Spec) Digest() string {
	parts := [][]byte{canonical(s)}
	parts = append(parts, empties("env=", s.Env)...)
	parts = append(parts, empties("labels=", s.Labels)...)
	if len(s.Network.Phases) > 0 {
		for _, name := range slices.Sorted(maps.Keys(s.Network.Services)) {
			if !s.Network.Services[name] {
				parts = append(parts, []byte(name))
			}
		}
	}
	return Digest("create", parts...)
}

// empties are the names in m that stand for nothing, which canonical drops. The prefix tells them from names of services.
func empties(prefix string, m map[string]string) (out [][]byte) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] == "" {
			out = append(out, []byte(prefix+name))
		}
	}
	return out
}

// canonical is v as JSON with sorted names and without zero values. v is a struct of plain data, which always encodes.
func canonical(v any) []byte {
	raw, err := json.Marshal(v)
	if err != nil {
		panic("sandbox: a plain struct does not encode: " + err.Error())
	}
	var tree any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber() // 64-bit numbers keep all their digits
	if err := dec.Decode(&tree); err != nil {
		panic("sandbox: own JSON does not decode: " + err.Error())
	}
	tree, _ = prune(tree)
	raw, err = json.Marshal(tree) // maps are written in the order of their names
	if err != nil {
		panic("sandbox: a pruned tree does not encode: " + err.Error())
	}
	return raw
}

// prune drops fields of objects that hold their zero value; elements of lists stay, since their place means something.
// A false value of a map of switches is dropped too: not allowed and not named are the same request.
func prune(v any) (out any, zero bool) {
	switch v := v.(type) {
	case nil:
		return nil, true
	case bool:
		return v, !v
	case json.Number:
		return v, v == "0"
	case string:
		return v, v == ""
	case []any:
		for i := range v {
			v[i], _ = prune(v[i])
		}
		return v, len(v) == 0
	case map[string]any:
		for k, e := range v {
			p, zero := prune(e)
			if zero {
				delete(v, k)
			} else {
				v[k] = p
			}
		}
		return v, len(v) == 0
	}
	return v, false
}
