package pypi

import (
	"cmp"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// version is a PEP 440 version, in order.
type version struct {
	epoch         int
	release       []int // without zeros at the end
	pre           []int // kind and number; nil: none
	post, dev     int   // -1: none
	local         []string
	valid         bool
	text          string
	hasPre, isDev bool
}

var pep440 = regexp.MustCompile(`^v?(?:(\d+)!)?(\d+(?:\.\d+)*)(?:[-_.]?(a|b|c|rc|alpha|beta|pre|preview)[-_.]?(\d*))?(?:-(\d+)|[-_.]?(?:post|rev|r)[-_.]?(\d*))?(?:[-_.]?dev[-_.]?(\d*))?(?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?$`)

// parseVersion never fails: what is no version sorts before all that are, by its text.
func parseVersion(s string) version {
	v := version{text: s, post: -1, dev: -1}
	low := strings.ToLower(strings.TrimSpace(s))
	m := pep440.FindStringSubmatchIndex(low)
	if m == nil {
		return v
	}
	group := func(i int) (string, bool) {
		if m[2*i] < 0 {
			return "", false
		}
		return low[m[2*i]:m[2*i+1]], true
	}
	number := func(i int) int {
		g, _ := group(i)
		n, err := strconv.Atoi(g)
		if err != nil && g != "" {
			return int(^uint(0) >> 1) // longer than any number that is meant
		}
		return n
	}
	v.valid = true
	v.epoch = number(1)
	rel, _ := group(2)
	for p := range strings.SplitSeq(rel, ".") {
		n, err := strconv.Atoi(p)
		if err != nil {
			n = int(^uint(0) >> 1)
		}
		v.release = append(v.release, n)
	}
	for len(v.release) > 1 && v.release[len(v.release)-1] == 0 {
		v.release = v.release[:len(v.release)-1]
	}
	if kind, ok := group(3); ok {
		rank := map[string]int{"a": 0, "alpha": 0, "b": 1, "beta": 1}
		k, known := rank[kind]
		if !known {
			k = 2 // c, rc, pre, preview
		}
		v.pre, v.hasPre = []int{k, number(4)}, true
	}
	if _, ok := group(5); ok {
		v.post = number(5)
	} else if _, ok := group(6); ok {
		v.post = number(6)
	}
	if _, ok := group(7); ok {
		v.dev, v.isDev = number(7), true
	}
	if l, ok := group(8); ok {
		v.local = strings.FieldsFunc(l, func(r rune) bool { return r == '.' || r == '-' || r == '_' })
	}
	return v
}

// prerelease tells whether installers leave the version out unless they are asked for it.
func (v version) prerelease() bool { return !v.valid || v.hasPre || v.isDev }

// compare orders versions as PEP 440 does.
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
	return cmp.Or(
		cmp.Compare(v.epoch, w.epoch),
		slices.Compare(v.release, w.release),
		slices.Compare(v.preKey(), w.preKey()),
		cmp.Compare(v.post, w.post),
		cmp.Compare(v.devKey(), w.devKey()),
		slices.CompareFunc(v.local, w.local, compareLocal),
	)
}

// preKey: 1.0.dev1 < 1.0a1 < 1.0rc1 < 1.0 = 1.0.post1.
func (v version) preKey() []int {
	switch {
	case v.hasPre:
		return v.pre
	case v.post < 0 && v.isDev:
		return []int{-1, 0}
	}
	return []int{3, 0}
}

func (v version) devKey() int {
	if v.isDev {
		return v.dev
	}
	return int(^uint(0) >> 1)
}

// compareLocal: numbers are larger than words.
func compareLocal(a, b string) int {
	m, aErr := strconv.Atoi(a)
	n, bErr := strconv.Atoi(b)
	switch {
	case aErr == nil && bErr == nil:
		return cmp.Compare(m, n)
	case aErr == nil:
		return 1
	case bErr == nil:
		return -1
	}
	return strings.Compare(a, b)
}
