package maven_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/mirror/maven"
	"github.com/sandsea/sandsea/internal/aether/mirror/source/sourcetest"
	"github.com/sandsea/sandsea/internal/policy"
)

// Maven itself, against the repository that this machine uses, led here by the configuration that sandboxes get.
func TestMaven(t *testing.T) {
	const artifact, jar = "org.slf4j:slf4j-api:1.7.36", "/org/slf4j/slf4j-api/1.7.36/slf4j-api-1.7.36.jar"
	u := sourcetest.Discovered(t, policy.Maven, jar, "mvn")
	m := sourcetest.Serve(t, maven.New(sourcetest.NewSource(t, u), u), policy.World{})

	root := t.TempDir()
	m.Guest(policy.Maven, root)
	// Java takes the home of a user from the system, not from HOME.
	env := []string{"MAVEN_OPTS=-Duser.home=" + filepath.Join(root, "root")}
	get := func() (string, error) {
		return sourcetest.Run(t, root, env, "mvn", "-B", "-q", "dependency:get", "-Dartifact="+artifact, "-Dtransitive=false")
	}
	if out, err := get(); err != nil {
		t.Fatalf("get: %v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(root, "root/.m2/repository", jar)); err != nil {
		t.Error(err)
	}
	var seen bool
	for _, e := range m.Events() {
		seen = seen || e.Kind == "file" && e.Name == "org.slf4j:slf4j-api" && e.Version == "1.7.36" && e.Digest != ""
	}
	if !seen {
		t.Error("the jar is in no report")
	}

	m.In(policy.World{Deny: []string{"maven:org.slf4j:slf4j-api"}})
	if err := os.RemoveAll(filepath.Join(root, "root/.m2/repository/org/slf4j/slf4j-api")); err != nil {
		t.Fatal(err)
	}
	if out, err := get(); err == nil || !strings.Contains(out, "403") {
		t.Errorf("a denied artifact: %v: %s", err, out)
	}

	// Whatever upstream says of dates: list and file agree.
	m.In(policy.World{AsOf: sourcetest.Day("2023-01-01")})
	list := m.Get("/org/slf4j/slf4j-api/maven-metadata.xml")
	for _, v := range []string{"1.7.36", "2.0.17"} {
		file := m.Get(strings.ReplaceAll(jar, "1.7.36", v))
		if listed := strings.Contains(list.Body, "<version>"+v+"</version>"); listed != (file.Status == http.StatusOK) {
			t.Errorf("%s: listed %v, but the file is answered %d", v, listed, file.Status)
		}
		if v == "2.0.17" && file.Status != http.StatusForbidden {
			t.Errorf("%s is of 2025: %d", v, file.Status)
		}
	}
}
