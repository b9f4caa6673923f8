package upstream

import (
	"archive/zip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/testkit/require"
)

// The clients of the machine are asked for real, with an environment of the test's own that configures each of them.
func TestClientsTellTheirConfiguration(t *testing.T) {
	home := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(home, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(".config/pip/pip.conf", "[global]\nindex-url = https://u:p%40ss@pip.example/simple/\nextra-index-url = https://more.example/simple\n")
	write(".npmrc", "registry=https://npm.example/r/\n//npm.example/r/:_authToken=${NPM_TOKEN}\n//other.example/:_authToken=no\n")
	write(".cargo/config.toml", "[source.crates-io]\nreplace-with = \"m\"\n[source.m]\nregistry = \"sparse+https://crates.example/index/\"\n")
	write(".m2/settings.xml", `<settings><servers><server><id>m</id><username>u</username><password>p</password></server></servers>
<mirrors><mirror><id>x</id><mirrorOf>other</mirrorOf><url>https://no.example</url></mirror>
<mirror><id>m</id><mirrorOf>external:*,!local</mirrorOf><url>https://maven.example/m2/</url></mirror></mirrors></settings>`)
	env := []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + home, "NPM_TOKEN=t0ken", "JAVA_HOME=" + os.Getenv("JAVA_HOME"),
		"GOPROXY=https://go.example,https://go2.example|direct", "GOSUMDB=sum.example+key https://sum.example", "GOENV=off", "GOFLAGS=",
		"PYENV_VERSION=" + os.Getenv("PYENV_VERSION"), "PYENV_ROOT=" + theirHome(t, ".pyenv"), "RUSTUP_HOME=" + theirHome(t, ".rustup"),
	}
	// Asked one by one, so that a machine without a client still tests the others.
	a := asker{dir: t.TempDir(), env: env}
	tests := []struct {
		service, needs string
		ask            func(context.Context) (Upstream, error)
		want           Upstream
	}{
		{"pypi", "bin:python3", a.pypi, Upstream{
			URLs: []string{"https://pip.example/simple", "https://more.example/simple"}, Found: "pip config list",
			Credentials: []Credential{{
				Origin: "https://pip.example", Home: "/simple", Header: "Authorization", Value: Basic("", "", "u", "p@ss").Value,
			}},
		}},
		{"npm", "bin:npm", a.npm, Upstream{URLs: []string{"https://npm.example/r"}, Found: "npm config get registry", Credentials: []Credential{
			{Origin: "https://npm.example", Path: "/r", Header: "Authorization", Value: "Bearer t0ken"},
		}}},
		{"golang", "bin:go", a.golang, Upstream{
			URLs: []string{"https://go.example", "https://go2.example"}, Checksums: "sum.example+key https://sum.example", Found: "go env GOPROXY",
		}},
		{"crates", "bin:cargo", a.crates, Upstream{URLs: []string{"https://crates.example/index"}, Found: "cargo's index"}},
		{"maven", "bin:mvn", a.maven, Upstream{
			URLs: []string{"https://maven.example/m2"}, Found: "mirrors in " + filepath.Join(home, ".m2/settings.xml"),
			Credentials: []Credential{Basic("https://maven.example", "/m2/", "u", "p")},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.service, func(t *testing.T) {
			require.Feature(t, tt.needs)
			got, err := tt.ask(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// theirHome finds where a version manager keeps what its programs in PATH need, when they are run with another HOME.
func theirHome(t *testing.T, name string) string {
	t.Helper()
	home, err := os.UserHomeDir()
	if err != nil {
		t.Skipf("needs a home directory: %v", err)
	}
	return filepath.Join(home, name)
}

// What the machine's own clients say is not known here, only that each is asked or says what is missing.
func TestEveryServiceIsFoundOrSaysWhatTheOperatorMustName(t *testing.T) {
	all, err := Discover(t.Context(), Node{Env: os.Environ()}, map[string]Setting{"rubygems": {URLs: []string{"https://gems.example/"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range services {
		u, ok := all[name]
		if !ok || (len(u.URLs) > 0) != (u.Found != "") || (len(u.URLs) == 0) != (u.Missing != "") {
			t.Errorf("%s: %+v", name, u)
		}
		if u.Missing != "" {
			t.Logf("%s", u.Missing)
			continue
		}
		t.Logf("%s: %d URLs by %s, hosts %d", name, len(u.URLs), u.Found, len(u.Hosts()))
	}
	if got := all["rubygems"]; got.Found != "aether.toml" || !slices.Equal(got.URLs, []string{"https://gems.example"}) {
		t.Errorf("the operator's word: %+v", got)
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	var again Upstreams
	if err := json.Unmarshal(b, &again); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(all, again); diff != "" {
		t.Errorf("JSON: %s", diff)
	}
}

func TestANodeWithoutClientsNamesWhatIsMissing(t *testing.T) {
	all, err := Discover(t.Context(), Node{Env: []string{"PATH=" + t.TempDir()}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range services {
		if u := all[name]; len(u.URLs) != 0 || !strings.Contains(u.Missing, "[services."+name+"]") {
			t.Errorf("%s: %+v", name, u)
		}
	}
}

func TestCargosFileWithoutAnEndingGoesFirst(t *testing.T) {
	require.Feature(t, "bin:cargo")
	home := t.TempDir()
	for name, host := range map[string]string{"config": "one", "config.toml": "two"} {
		text := "[source.crates-io]\nreplace-with = \"m\"\n[source.m]\nregistry = \"sparse+https://" + host + ".example/\"\n"
		if err := os.WriteFile(filepath.Join(home, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a := asker{dir: t.TempDir(), env: []string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "CARGO_HOME=" + home, "RUSTUP_HOME=" + theirHome(t, ".rustup"),
	}}
	u, err := a.crates(t.Context())
	if err != nil || !slices.Equal(u.URLs, []string{"https://one.example"}) {
		t.Errorf("%+v, %v", u, err)
	}
}

// apt is asked for real, about sources whose lists it has never fetched.
func TestAptTellsSourcesWithoutLists(t *testing.T) {
	require.Feature(t, "bin:apt-get")
	dir := t.TempDir()
	for name, text := range map[string]string{
		"lists/partial/x": "",
		"parts/a.sources": "Types: deb\nURIs: mirror+file://DIR/mirrors\nSuites: stable\nComponents: main\n\n" +
			"Types: deb\nURIs: https://u:p@deb.example/debian\nSuites: stable stable-updates\nComponents: main\n",
		"mirrors":  "# ours\nhttps://one.example/debian\tpriority:1\nhttps://two.example/debian/\n",
		"apt.conf": `Dir::State "DIR"; Dir::State::status "/dev/null"; Dir::Cache "DIR"; Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "DIR/parts";`,
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "DIR", dir)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	a := asker{dir: t.TempDir(), env: []string{"PATH=" + os.Getenv("PATH"), "APT_CONFIG=" + filepath.Join(dir, "apt.conf")}}
	u, err := a.debian(t.Context())
	want := []string{"https://deb.example/debian", "https://one.example/debian", "https://two.example/debian"}
	slices.Sort(u.URLs)
	if err != nil || !slices.Equal(u.URLs, want) || len(u.Credentials) != 1 {
		t.Errorf("got %+v, %v; want %v", u, err, want)
	}
}

// The programs here print what gem, apt-get and go print in configurations that a test cannot give the real ones.
func TestAnswersOfClientsThatServeNoWebAddress(t *testing.T) {
	dir := t.TempDir()
	program := func(name, out string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\ncat <<'E'\n"+out+"\nE\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	program("gem", "*** CURRENT SOURCES ***\n\nhttps://u:p@gems.example/\nhttps://two.example/")
	program("apt-get", "http://deb.example/debian/\ncdrom:[Debian]/\nhttp://deb.example/debian/\nfile:/srv/apt/")
	program("go", "off\noff")
	a := asker{dir: t.TempDir(), env: []string{"PATH=" + dir + ":/usr/bin:/bin"}}
	gems, err := a.rubygems(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"https://gems.example", "https://two.example"}; !slices.Equal(gems.URLs, want) || len(gems.Credentials) != 1 {
		t.Errorf("gem: %+v", gems)
	}
	deb, err := a.debian(t.Context())
	if err != nil || !slices.Equal(deb.URLs, []string{"http://deb.example/debian"}) {
		t.Errorf("apt: %+v, %v", deb, err)
	}
	if g, err := a.golang(t.Context()); err != nil || len(g.URLs) != 0 {
		t.Errorf("go: %+v, %v", g, err)
	}
}

func TestPipConfigOrder(t *testing.T) {
	tests := []struct{ list, index, extra string }{
		{"", "", ""},
		{"global.index-url='https://a.example/simple'\n", "https://a.example/simple", ""},
		{":env:.index-url='https://e.example'\nglobal.index-url='https://a.example'\ninstall.index-url='https://i.example'\n", "https://e.example", ""},
		{"install.index-url='https://i.example'\nglobal.index-url='https://a.example'\ndownload.index-url='https://d.example'", "https://i.example", ""},
		{"global.extra-index-url='\\nhttps://x.example\\nhttps://y.example'\nglobal.timeout='5'", "", "https://x.example https://y.example"},
		{"nonsense\nglobal.index-url", "", ""},
	}
	for _, tt := range tests {
		index, extra := parsePipConfig(tt.list)
		if index != tt.index || strings.Join(extra, " ") != tt.extra {
			t.Errorf("%q gives %q, %q", tt.list, index, extra)
		}
	}
}

func TestNpmrcCredentials(t *testing.T) {
	env := func(string) string { return "T" }
	got := parseNpmrc(strings.Join([]string{
		"registry=https://a.example", "; //c.example/:_authToken=x", "//a.example:8443/p/:_authToken=\"${TOK}\"",
		"//b.example/:username=u", "//b.example/:_password=cA==", "//d.example/:_auth=dTpw", "//e.example/:always-auth=true", "//:x=y", "//%zz/:_authToken=t",
	}, "\n"), env)
	var lines []string
	for _, c := range got {
		lines = append(lines, fmt.Sprintf("%s%s %s", c.Origin, c.Path, c.Value))
	}
	want := []string{
		"https://a.example:8443/p Bearer T", "http://a.example:8443/p Bearer T",
		"https://b.example Basic dTpw", "http://b.example Basic dTpw",
		"https://d.example Basic dTpw", "http://d.example Basic dTpw",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Error(diff)
	}
}

func TestScopesOfNpmThatAreNotFollowedAreTold(t *testing.T) {
	dir := t.TempDir()
	rc := filepath.Join(dir, "npmrc")
	if err := os.WriteFile(rc, []byte("@corp:registry = https://corp.example/\n; @no:registry=x\n@a:registry=https://a.example\n@corp:registry=y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	script := "#!/bin/sh\necho registry=https://npm.example/\necho userconfig=" + rc + "\n"
	if err := os.WriteFile(filepath.Join(dir, "npm"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	u, err := asker{dir: t.TempDir(), env: []string{"PATH=" + dir + ":/usr/bin:/bin"}}.npm(t.Context())
	if err != nil || !strings.Contains(u.Found, "without the registries of @a, @corp:") {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestMirrorsOfMavensCentral(t *testing.T) {
	for of, want := range map[string]bool{
		"*": true, "central": true, "external:*": true, "a,central": true, "*,!central": false, "a": false, "": false, "external:http:*": false,
	} {
		if got := mirrorsCentral(of); got != want {
			t.Errorf("mirrorOf %q: %v", of, got)
		}
	}
	jar := filepath.Join(t.TempDir(), "maven-model-builder-1.jar")
	f, err := os.Create(jar)
	if err != nil {
		t.Fatal(err)
	}
	z := zip.NewWriter(f)
	w, err := z.Create("org/apache/maven/model/pom-4.0.0.xml")
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(w, `<project xmlns="http://maven.example/POM/4.0.0"><repositories><repository><id>central</id><url>https://central.example/maven2</url></repository></repositories></project>`)
	if err := errors.Join(z.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if got, err := superPOM(jar); err != nil || got != "https://central.example/maven2" {
		t.Errorf("super POM: %q, %v", got, err)
	}
}

func TestMavensSettingsTogether(t *testing.T) {
	env := func(name string) string { return map[string]string{"MIRROR": "m.example", "PASS": "s3cret"}[name] }
	var s mavenSettings
	s.add("user", []byte(`<settings><servers><server><id>m</id><username>u</username><password>${env.PASS}</password></server></servers></settings>`), env)
	s.add("global", []byte(`<settings><mirrors><mirror><id>all</id><mirrorOf>*</mirrorOf><url>https://all.example</url></mirror>
		<mirror><id>m</id><mirrorOf>central</mirrorOf><url> https://${env.MIRROR}/m2 </url></mirror></mirrors>
		<servers><server><id>m</id><username>other</username><password>no</password></server></servers></settings>`), env)
	want := Upstream{
		URLs: []string{"https://m.example/m2"}, Found: "mirrors in global",
		Credentials: []Credential{Basic("https://m.example", "/m2", "u", "s3cret")},
	}
	if diff := cmp.Diff(want, s.upstream()); diff != "" {
		t.Error(diff)
	}
	s = mavenSettings{}
	s.add("user", []byte(`<settings><mirrors><mirror><id>m</id><mirrorOf>*</mirrorOf><url>https://${env.UNSET}/</url></mirror></mirrors></settings>`), env)
	if u := s.upstream(); len(u.URLs) != 0 {
		t.Errorf("a variable that is not set: %+v", u)
	}
}

func TestSettingsOfTheOperator(t *testing.T) {
	pass := filepath.Join(t.TempDir(), "pass")
	if err := os.WriteFile(pass, []byte("s3cret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found := Upstream{URLs: []string{"https://found.example/simple"}, Files: []string{"https://files.example"}, Found: "pip's default index"}
	u, err := Setting{URLs: []string{"https://mine.example/simple/"}, User: "u", PasswordFile: pass}.apply("pypi", found)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Upstream{
		URLs: []string{"https://mine.example/simple"}, Found: "aether.toml",
		Credentials: []Credential{Basic("https://mine.example", "", "u", "s3cret")},
	}, u); diff != "" {
		t.Error(diff)
	}
	u, err = Setting{Header: "Authorization", ValueFile: pass}.apply("pypi", found)
	if err != nil || u.Found != found.Found || len(u.Credentials) != 2 {
		t.Errorf("a header for what was found: %+v, %v", u, err)
	}
	u, err = Setting{URLs: []string{"https://go.example"}}.apply("golang", Upstream{Checksums: "sum.example"})
	if err != nil || u.Checksums != "sum.example" {
		t.Errorf("another proxy keeps the checksum database: %+v, %v", u, err)
	}
	for name, s := range map[string]Setting{
		"pypi.urls":      {URLs: []string{"ftp://x.example"}},
		"pypi.files":     {Files: []string{"nonsense"}},
		"pypi.user":      {User: "u"},
		"pypi.header":    {Header: "Host", ValueFile: "f"},
		"pypi.checksums": {Checksums: "x"},
		"nope.":          {},
	} {
		service, field, _ := strings.Cut(name, ".")
		err := s.Validate(service)
		if !errors.Is(err, errdefs.Invalid) || errdefs.From(err).Field != "services."+service+"."+field {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := Discover(t.Context(), Node{}, map[string]Setting{service: s}); err == nil {
			t.Errorf("%s: Discover takes it", name)
		}
	}
	if _, err := (Setting{User: "u", PasswordFile: pass + ".no"}).apply("pypi", found); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestSecretsAreNotPrinted(t *testing.T) {
	u := Upstream{Credentials: []Credential{Basic("https://x.example", "", "u", "hunter2")}}
	value := u.Credentials[0].Value
	for _, s := range []string{fmt.Sprint(u), fmt.Sprintf("%+v", u), fmt.Sprintf("%#v", u)} {
		if strings.Contains(s, value) || strings.Contains(s, "hunter2") {
			t.Errorf("printed: %s", s)
		}
	}
	if _, _, err := take("https://u:hunter2@ho st/"); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error: %v", err)
	}
}

func TestHostsOfAnUpstream(t *testing.T) {
	u := Upstream{URLs: []string{"https://A.example:8443/x", "http://b.example"}, Files: []string{"https://a.example", "https://c.example/y"}}
	if diff := cmp.Diff([]string{"a.example", "b.example", "c.example"}, u.Hosts()); diff != "" {
		t.Error(diff)
	}
}

func FuzzClientsAnswers(f *testing.F) {
	f.Add("global.index-url='https://u:p@a.example/'")
	f.Add("//a.example/:_authToken=${X}")
	f.Add(`<settings><mirrors><mirror><mirrorOf>*</mirrorOf><url>https://x.example</url></mirror></mirrors></settings>`)
	f.Fuzz(func(t *testing.T, s string) {
		parsePipConfig(s)
		parseNpmrc(s, func(string) string { return s })
		var m mavenSettings
		m.add("", []byte(s), func(string) string { return s })
		m.upstream()
		var u Upstream
		u.add(s)
		for _, got := range u.URLs {
			if again, c, err := take(got); err != nil || c != nil || again != got {
				t.Errorf("%q becomes %q, then %q, %v", s, got, again, err)
			}
		}
	})
}
