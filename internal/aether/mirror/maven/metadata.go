package maven

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"slices"
	"time"
)

// metadata is a maven-metadata.xml of an artifact, of a group, or of both.
type metadata struct {
	XMLName      xml.Name    `xml:"metadata"`
	ModelVersion string      `xml:"modelVersion,attr,omitempty"`
	Group        string      `xml:"groupId,omitempty"`
	Artifact     string      `xml:"artifactId,omitempty"`
	Version      string      `xml:"version,omitempty"`
	Versioning   *versioning `xml:"versioning"`
	Plugins      []plugin    `xml:"plugins>plugin,omitempty"`
}

type versioning struct {
	Latest   string   `xml:"latest,omitempty"`
	Release  string   `xml:"release,omitempty"`
	Versions []string `xml:"versions>version,omitempty"` // in the order of their publication
	Updated  string   `xml:"lastUpdated,omitempty"`
}

// plugin of a group, which Maven finds by its prefix.
type plugin struct {
	Name     string `xml:"name,omitempty"`
	Prefix   string `xml:"prefix"`
	Artifact string `xml:"artifactId"`
}

const (
	maxVersions = 50_000
	stamp       = "20060102150405" // of lastUpdated, in UTC
)

func parseMetadata(b []byte) (*metadata, error) {
	m := &metadata{}
	if err := xml.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("maven-metadata.xml: %w", err)
	}
	if m.Versioning != nil && len(m.Versioning.Versions) > maxVersions {
		return nil, fmt.Errorf("maven-metadata.xml has more than %d versions", maxVersions)
	}
	if m.Versioning != nil {
		for _, v := range m.Versioning.Versions {
			if !isPart(v) {
				return nil, fmt.Errorf("maven-metadata.xml has version %.100q", v)
			}
		}
	}
	return m, nil
}

// updated is when the last version was published: none of those listed is later. Zero: nobody says.
func (m *metadata) updated() time.Time {
	if m.Versioning == nil {
		return time.Time{}
	}
	t, err := time.Parse(stamp, m.Versioning.Updated)
	if err != nil {
		return time.Time{}
	}
	return t
}

// merge adds what another repository has.
func (m *metadata) merge(o *metadata) {
	for _, p := range o.Plugins {
		if !slices.ContainsFunc(m.Plugins, func(q plugin) bool { return q.Prefix == p.Prefix }) {
			m.Plugins = append(m.Plugins, p)
		}
	}
	if o.Versioning == nil {
		return
	}
	if m.Versioning == nil {
		m.Versioning = o.Versioning
		return
	}
	// A date of one repository says nothing of what another has.
	undated := m.updated().IsZero() || o.updated().IsZero()
	for _, v := range o.Versioning.Versions {
		if !slices.Contains(m.Versioning.Versions, v) {
			m.Versioning.Versions = append(m.Versioning.Versions, v)
		}
	}
	if o.updated().After(m.updated()) {
		m.Versioning.Latest, m.Versioning.Release = o.Versioning.Latest, o.Versioning.Release
		m.Versioning.Updated = o.Versioning.Updated
	}
	if undated {
		m.Versioning.Updated = ""
	}
}

// keep leaves only the versions that show accepts, with latest and release among them, and says that the last one came
// at until at the latest, if that is not zero.
func (m *metadata) keep(show func(version string) bool, until time.Time) {
	v := m.Versioning
	v.Versions = slices.DeleteFunc(v.Versions, func(s string) bool { return !show(s) })
	if !slices.Contains(v.Versions, v.Latest) && v.Latest != "" {
		v.Latest = lastOf(v.Versions, func(string) bool { return true })
	}
	if !slices.Contains(v.Versions, v.Release) && v.Release != "" {
		v.Release = lastOf(v.Versions, func(s string) bool { return !isSnapshot(s) })
	}
	if !until.IsZero() && m.updated().After(until) {
		v.Updated = until.UTC().Format(stamp)
	}
}

func lastOf(versions []string, ok func(string) bool) string {
	for _, v := range slices.Backward(versions) {
		if ok(v) {
			return v
		}
	}
	return ""
}

func (m *metadata) encode() ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(xml.Header)
	e := xml.NewEncoder(&b)
	e.Indent("", "  ")
	if err := e.Encode(m); err != nil {
		return nil, err
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}
