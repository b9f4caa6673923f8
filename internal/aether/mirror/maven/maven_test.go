package maven_test

import (
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/internal/aether/mirror"
	"github.com/sandsea/sandsea/internal/aether/mirror/maven"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/aether/upstream"
	"github.com/sandsea/sandsea/internal/policy"
)

func sha1Of(s string) string {
	h := sha1.Sum([]byte(s))
	return hex.EncodeToString(h[:])
}

const dir = "/test/group/art"

// add publishes a version. when is empty for a repository that tells no dates.
func add(up *sourcetest.Upstream, version, when string) {
	var modified time.Time
	if when != "" {
		modified = sourcetest.Day(when)
	}
	for _, ending := range []string{".pom", ".jar", "-sources.jar"} {
		path := dir + "/" + version + "/art-" + version + ending
		up.PutFile(path, sourcetest.File{Body: "art " + version + ending, Modified: modified})
		up.Put(path+".sha1", sha1Of("art "+version+ending))
	}
}

func list(updated string, versions ...string) string {
	var b strings.Builder
	b.WriteString("<?xml version=\"1.0\"?>\n<metadata modelVersion=\"1.1.0\"><groupId>test.group</groupId><artifactId>art</artifactId><versioning>")
	fmt.Fprintf(&b, "<latest>%s</latest><release>%s</release><versions>", versions[len(versions)-1], versions[len(versions)-1])
	for _, v := range versions {
		fmt.Fprintf(&b, "<version>%s</version>", v)
	}
	fmt.Fprintf(&b, "</versions><lastUpdated>%s</lastUpdated></versioning></metadata>", updated)
	return b.String()
}

func start(t testing.TB, w policy.World, ups ...*sourcetest.Upstream) *sourcetest.Mount {
	u := upstream.Upstream{}
	for _, up := range ups {
		u.URLs = append(u.URLs, up.URL)
	}
	return sourcetest.Serve(t, maven.New(sourcetest.NewSource(t, u), u), w)
}

func dated(t testing.TB) *sourcetest.Upstream {
	up := sourcetest.NewUpstream(t)
	add(up, "1.0", "2023-01-01")
	add(up, "1.1", "2024-01-01")
	add(up, "2.0", "2025-01-01")
	up.Put(dir+"/maven-metadata.xml", list("20250101000000", "1.0", "1.1", "2.0"))
	return up
}

type answer struct {
	Latest   string   `xml:"versioning>latest"`
	Release  string   `xml:"versioning>release"`
	Versions []string `xml:"versioning>versions>version"`
	Updated  string   `xml:"versioning>lastUpdated"`
}

func read(t *testing.T, m *sourcetest.Mount) answer {
	t.Helper()
	got := m.Get(dir + "/maven-metadata.xml")
	if got.Status != http.StatusOK {
		t.Fatalf("metadata: %d %s", got.Status, got.Body)
	}
	var a answer
	if err := xml.Unmarshal([]byte(got.Body), &a); err != nil {
		t.Fatal(err)
	}
	md, sh, s2 := md5.Sum([]byte(got.Body)), sha1.Sum([]byte(got.Body)), sha256.Sum256([]byte(got.Body))
	for ending, want := range map[string]string{"md5": hex.EncodeToString(md[:]), "sha1": hex.EncodeToString(sh[:]), "sha256": hex.EncodeToString(s2[:])} {
		if got := m.Get(dir + "/maven-metadata.xml." + ending); got.Body != want {
			t.Errorf("%s of the metadata: got %s, want %s", ending, got.Body, want)
		}
	}
	return a
}

func TestMetadataAndFilesAgree(t *testing.T) {
	for _, c := range []struct {
		name  string
		world policy.World
		want  answer
	}{
		{"today", policy.World{}, answer{"2.0", "2.0", []string{"1.0", "1.1", "2.0"}, "20250101000000"}},
		{"a date", policy.World{AsOf: sourcetest.Day("2024-06-01")}, answer{"1.1", "1.1", []string{"1.0", "1.1"}, "20240601000000"}},
		{"the day itself", policy.World{AsOf: sourcetest.Day("2025-01-01")}, answer{"2.0", "2.0", []string{"1.0", "1.1", "2.0"}, "20250101000000"}},
		{"a denied version", policy.World{Deny: []string{"maven:test.group:art@2.0"}}, answer{"1.1", "1.1", []string{"1.0", "1.1"}, "20250101000000"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := start(t, c.world, dated(t))
			if diff := cmp.Diff(c.want, read(t, m)); diff != "" {
				t.Errorf("metadata (-want +got):\n%s", diff)
			}
			for _, v := range []string{"1.0", "1.1", "2.0"} {
				shown := strings.Contains(strings.Join(c.want.Versions, " "), v)
				for _, ending := range []string{".pom", ".jar", "-sources.jar", ".jar.sha1"} {
					got := m.Get(dir + "/" + v + "/art-" + v + ending)
					want := "art " + v + ending
					if ending == ".jar.sha1" {
						want = sha1Of("art " + v + ".jar")
					}
					switch {
					case shown && got.Body != want:
						t.Errorf("%s%s: %d %s", v, ending, got.Status, got.Body)
					case !shown && (got.Status != http.StatusForbidden || got.Rule() == ""):
						t.Errorf("%s%s: got %d, rule %q", v, ending, got.Status, got.Rule())
					}
				}
			}
		})
	}
}

func TestWithoutDatesTheMetadatasOwnOneCounts(t *testing.T) {
	up := sourcetest.NewUpstream(t)
	add(up, "1.0", "")
	add(up, "1.1", "")
	up.Put(dir+"/maven-metadata.xml", list("20240101000000", "1.0", "1.1"))
	// All of it is older than the world.
	m := start(t, policy.World{AsOf: sourcetest.Day("2024-06-01")}, up)
	if got := read(t, m); len(got.Versions) != 2 {
		t.Errorf("versions %v", got.Versions)
	}
	if got := m.Get(dir + "/1.1/art-1.1.jar"); got.Status != http.StatusOK {
		t.Errorf("jar: %d %s", got.Status, got.Body)
	}
	// Some of it may be younger, and nobody says which.
	m.In(policy.World{AsOf: sourcetest.Day("2023-06-01"), Pin: []string{"maven:test.group:art@1.0"}})
	if got := read(t, m); len(got.Versions) != 1 || got.Versions[0] != "1.0" || got.Release != "1.0" {
		t.Errorf("metadata %+v", got)
	}
	if got := m.Get(dir + "/1.0/art-1.0.jar"); got.Status != http.StatusOK {
		t.Errorf("pinned jar: %d %s", got.Status, got.Body)
	}
	if got := m.Get(dir + "/1.1/art-1.1.jar"); got.Rule() != policy.RuleUndated {
		t.Errorf("jar: %d, rule %q", got.Status, got.Rule())
	}
	// What the metadata does not list may be of any day.
	add(up, "0.9", "")
	m.In(policy.World{AsOf: sourcetest.Day("2024-06-01")})
	if got := m.Get(dir + "/0.9/art-0.9.jar"); got.Rule() != policy.RuleUndated {
		t.Errorf("unlisted jar: %d, rule %q", got.Status, got.Rule())
	}
}

func TestSnapshotsHaveNoDate(t *testing.T) {
	up := dated(t)
	up.PutFile(dir+"/3.0-SNAPSHOT/art-3.0-20200101.120000-1.jar", sourcetest.File{Body: "snapshot", Modified: sourcetest.Day("2020-01-01")})
	up.Put(dir+"/3.0-SNAPSHOT/maven-metadata.xml", "<metadata/>")
	m := start(t, policy.World{}, up)
	if got := m.Get(dir + "/3.0-SNAPSHOT/art-3.0-20200101.120000-1.jar"); got.Body != "snapshot" {
		t.Errorf("today: %d", got.Status)
	}
	m.In(policy.World{AsOf: sourcetest.Day("2024-01-01")})
	for _, file := range []string{"art-3.0-20200101.120000-1.jar", "maven-metadata.xml"} {
		if got := m.Get(dir + "/3.0-SNAPSHOT/" + file); got.Rule() != policy.RuleUndated {
			t.Errorf("%s: %d, rule %q", file, got.Status, got.Rule())
		}
	}
}

func TestTheChecksumOfASnapshotsMetadataIsOfWhatIsServed(t *testing.T) {
	up := sourcetest.NewUpstream(t)
	m := start(t, policy.World{}, up)
	place := dir + "/3.0-SNAPSHOT/maven-metadata.xml"
	for _, build := range []string{"build 1", "build 2"} { // the second comes while the first is still fresh here
		up.Put(place, build)
		up.Put(place+".sha1", sha1Of(build))
		body := m.Get(place).Body
		if build == "build 1" {
			continue
		}
		if got := m.Get(place + ".sha1").Body; got != sha1Of(body) {
			t.Errorf("checksum of %q: %s", body, got)
		}
	}
}

func TestDeniedArtifacts(t *testing.T) {
	for _, entry := range []string{"maven:test.group:art", "maven:TEST.group:Art"} {
		up := dated(t)
		m := start(t, policy.World{Deny: []string{entry}}, up)
		for _, path := range []string{"/maven-metadata.xml", "/maven-metadata.xml.sha1", "/1.0/art-1.0.jar", "/1.0/art-1.0.pom", "/1.0/art-1.0.jar.md5"} {
			if got := m.Get(dir + path); got.Status != http.StatusForbidden || !strings.HasPrefix(got.Rule(), policy.RuleDeny) {
				t.Errorf("%s: %d, rule %q", path, got.Status, got.Rule())
			}
		}
		if asked := up.Asked(); len(asked) > 0 {
			t.Errorf("asked upstream for %v", asked)
		}
	}
}

func TestPluginsOfAGroup(t *testing.T) {
	up := sourcetest.NewUpstream(t)
	up.Put("/test/plugins/maven-metadata.xml", `<metadata><plugins>
		<plugin><name>A</name><prefix>a</prefix><artifactId>a-maven-plugin</artifactId></plugin>
		<plugin><name>B</name><prefix>b</prefix><artifactId>b-maven-plugin</artifactId></plugin></plugins></metadata>`)
	m := start(t, policy.World{Deny: []string{"maven:test.plugins:b-maven-plugin"}}, up)
	got := m.Get("/test/plugins/maven-metadata.xml")
	if !strings.Contains(got.Body, "a-maven-plugin") || strings.Contains(got.Body, "b-maven-plugin") {
		t.Errorf("got %d %s", got.Status, got.Body)
	}
}

func TestSeveralRepositories(t *testing.T) {
	first, second := sourcetest.NewUpstream(t), sourcetest.NewUpstream(t)
	add(first, "1.0", "2023-01-01")
	add(second, "1.1", "2024-01-01")
	first.Put(dir+"/maven-metadata.xml", list("20230101000000", "1.0"))
	second.Put(dir+"/maven-metadata.xml", list("20240101000000", "1.1"))
	m := start(t, policy.World{}, first, second)
	if diff := cmp.Diff(answer{"1.1", "1.1", []string{"1.0", "1.1"}, "20240101000000"}, read(t, m)); diff != "" {
		t.Error(diff)
	}
	for _, v := range []string{"1.0", "1.1"} {
		if got := m.Get(dir + "/" + v + "/art-" + v + ".jar"); got.Status != http.StatusOK {
			t.Errorf("%s: %d", v, got.Status)
		}
	}
}

func TestListsGoByThePOMsDateToo(t *testing.T) {
	up := sourcetest.NewUpstream(t)
	add(up, "1.0", "2023-01-01")
	add(up, "2.0", "2025-01-01") // came without an update of the metadata's date
	up.Put(dir+"/maven-metadata.xml", list("20230101000000", "1.0", "2.0"))
	m := start(t, policy.World{AsOf: sourcetest.Day("2024-06-01")}, up)
	if got := m.Get(dir + "/2.0/art-2.0.jar"); got.Status != http.StatusForbidden {
		t.Errorf("the file: %d", got.Status)
	}
	if got := read(t, m); got.Latest != "1.0" || len(got.Versions) != 1 {
		t.Errorf("the list: %+v", got)
	}
}

func TestADateOfOneRepositoryIsNoneOfAnother(t *testing.T) {
	for _, undatedFirst := range []bool{true, false} {
		dated, undated := sourcetest.NewUpstream(t), sourcetest.NewUpstream(t)
		add(dated, "1.0", "")
		dated.Put(dir+"/maven-metadata.xml", list("20230101000000", "1.0"))
		add(undated, "9.0", "")
		undated.Put(dir+"/maven-metadata.xml", list("", "9.0"))
		ups := []*sourcetest.Upstream{dated, undated}
		if undatedFirst {
			ups = []*sourcetest.Upstream{undated, dated}
		}
		m := start(t, policy.World{AsOf: sourcetest.Day("2024-06-01")}, ups...)
		if got := m.Get(dir + "/9.0/art-9.0.jar"); got.Rule() != policy.RuleUndated {
			t.Errorf("undated first %t: a version that nobody dates: %d %s", undatedFirst, got.Status, got.Body)
		}
		if got := m.Get(dir + "/maven-metadata.xml"); strings.Contains(got.Body, "<version>9.0") {
			t.Errorf("undated first %t: the list has it: %s", undatedFirst, got.Body)
		}
	}
}

func TestWrongFilesBreakOff(t *testing.T) {
	up := dated(t)
	m := start(t, policy.World{}, up)
	path := dir + "/1.0/art-1.0.jar"
	for name, f := range map[string]sourcetest.File{"other bytes": {Body: "art 1.0.JAR"}, "too few": {Body: "art 1.0.jar", Cut: 3}} {
		up.PutFile(path, f)
		if got := m.Get(path); !got.Broken && got.Status == http.StatusOK {
			t.Errorf("%s: %d %q", name, got.Status, got.Body)
		}
	}
	up.Put(path, "art 1.0.jar")
	if got := m.Get(path); got.Body != "art 1.0.jar" {
		t.Errorf("right bytes again: %d %q", got.Status, got.Body)
	}
}

func TestUnknownAndMalformed(t *testing.T) {
	m := start(t, policy.World{}, dated(t))
	for path, want := range map[string]int{
		"/test/group/none/maven-metadata.xml":  404,
		"/test/group/art/9/art-9.jar":          404,
		"/test/group/art/1.0/other-1.0.jar":    404,
		"/test/group/art/1.0/art-1.1.jar":      404,
		"/maven-metadata.xml":                  404,
		"/x.jar":                               404,
		"/test/group/art/1.0/..%2fart-1.0.jar": 404,
		"/archetype-catalog.xml":               404,
	} {
		if got := m.Get(path); got.Status != want {
			t.Errorf("%s: got %d, want %d", path, got.Status, want)
		}
	}
	up := sourcetest.NewUpstream(t)
	up.Put(dir+"/maven-metadata.xml", "<html>")
	m = start(t, policy.World{}, up)
	if got := m.Get(dir + "/maven-metadata.xml"); got.Status != http.StatusBadGateway {
		t.Errorf("no XML: %d", got.Status)
	}
}

var _ mirror.Service = (*maven.Service)(nil)
