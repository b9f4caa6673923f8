package npm

import (
	"cmp"
	"slices"
	"strings"
)

// version is a semantic version, in order.
type version struct {
	text  string
	core  [3]string // digits without leading zeros
	pre   []string
	valid bool
}

// parseVersion never fails: what is no version sorts before all that are, by its text.
func parseVersion(s string) version {
	v := version{text: s}
	rest, _, _ := strings.Cut(strings.TrimLeft(strings.TrimSpace(s), "v="), "+")
	core, pre, hasPre := strings.Cut(rest, "-")
	parts := strings.Split(core, ".")
	if len(parts) != 3 || hasPre && pre == "" {
		return v
	}
	for i, p := range parts {
		if !digits(p) {
			return v
		}
		v.core[i] = strip(p)
	}
	if hasPre {
		v.pre = strings.Split(pre, ".")
	}
	v.valid = true
	return v
}

func digits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// strip leading zeros.
func strip(s string) string {
	if t := strings.TrimLeft(s, "0"); t != "" {
		return t
	}
	return "0"
}

func (v version) prerelease() bool { return !v.valid || v.pre != nil }

// compare orders versions as semver does, build metadata apart.
func (v version) compare(w version) int {
	if v.valid != w.valid {
		if w.valid {
			return -1
		}
		return 1
	}
	if !v.valid {
		return strings.Compare(v.text, w.text)
	}
	for i := range v.core {
		if c := compareDigits(v.core[i], w.core[i]); c != 0 {
			return c
		}
	}
	switch {
	case v.pre == nil && w.pre == nil:
		return 0
	case v.pre == nil:
		return 1
	case w.pre == nil:
		return -1
	}
	return slices.CompareFunc(v.pre, w.pre, func(a, b string) int {
		switch an, bn := digits(a), digits(b); {
		case an && bn:
			return compareDigits(strip(a), strip(b))
		case an:
			return -1
		case bn:
			return 1
		}
		return strings.Compare(a, b)
	})
}

// compareDigits of any length, without leading zeros.
func compareDigits(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b))
}
