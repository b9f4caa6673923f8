package main

import (
	"cmp"
	"slices"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

// comparison orders two sandboxes.
type comparison func(a, b *sandseav1.Sandbox) int

// sandboxSorts are the columns that ls can sort by, least first: the youngest, the smallest limit.
var sandboxSorts = []struct {
	name    string
	compare comparison
}{
	{"age", func(a, b *sandseav1.Sandbox) int {
		return b.GetCreatedAt().AsTime().Compare(a.GetCreatedAt().AsTime())
	}},
	{"idle", func(a, b *sandseav1.Sandbox) int { return cmp.Compare(a.GetIdleForMs(), b.GetIdleForMs()) }},
	{"image", func(a, b *sandseav1.Sandbox) int { return strings.Compare(imageWord(a), imageWord(b)) }},
	{"mem", func(a, b *sandseav1.Sandbox) int {
		return cmp.Compare(a.GetSpec().GetLimits().GetMemoryBytes(), b.GetSpec().GetLimits().GetMemoryBytes())
	}},
	{"node", func(a, b *sandseav1.Sandbox) int { return strings.Compare(a.GetNode(), b.GetNode()) }},
	{"state", func(a, b *sandseav1.Sandbox) int { return strings.Compare(stateWord(a), stateWord(b)) }},
}

// sortNames are the names of sandboxSorts.
func sortNames() []string {
	var names []string
	for _, s := range sandboxSorts {
		names = append(names, s.name)
	}
	return names
}

// parseSort reads "mem,-age": by mem, among equals by age with the oldest first.
func parseSort(text string) (comparison, error) {
	var keys []comparison
	for word := range strings.SplitSeq(text, ",") {
		name, down := strings.CutPrefix(word, "-")
		i := slices.Index(sortNames(), name)
		if i < 0 {
			e := errdefs.New(errdefs.Invalid, "", "--sort %s: no column %q", ui.Text(text), ui.Text(name)).WithField("sort", "").
				WithHint("Columns: %s", strings.Join(sortNames(), ", "))
			if near := ui.Nearest(name, sortNames()); near != "" {
				e = e.WithHint("Did you mean %s?", near)
			}
			return nil, misuse(e)
		}
		key := sandboxSorts[i].compare
		if down {
			up := key
			key = func(a, b *sandseav1.Sandbox) int { return up(b, a) }
		}
		keys = append(keys, key)
	}
	return func(a, b *sandseav1.Sandbox) int {
		for _, key := range keys {
			if c := key(a, b); c != 0 {
				return c
			}
		}
		return 0
	}, nil
}
