package packages

import (
	"maps"
	"net/http"
	"slices"
	"testing"

	"github.com/sandsea/sandsea/internal/policy"
)

const mavenProject = `mkdir -p /w/src/main/java && cd /w && cat >src/main/java/W.java <<'E'
public class W { public static void main(String[] a) { System.out.println(new com.google.gson.Gson().toJson(a)); } }
E
cat >pom.xml <<'E'
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>w</groupId><artifactId>w</artifactId><version>1</version>
<properties><maven.compiler.source>17</maven.compiler.source><maven.compiler.target>17</maven.compiler.target><project.build.sourceEncoding>UTF-8</project.build.sourceEncoding></properties>
<dependencies><dependency><groupId>com.google.code.gson</groupId><artifactId>gson</artifactId><version>2.10.1</version></dependency></dependencies>
</project>
E
`

// mavenBuild leaves out the tests' plugin, of which there is nothing to run.
const mavenBuild = "mvn -B -q -Dmaven.test.skip=true package"

func TestMavenBuildsAndTheSecondTimeFromTheCache(t *testing.T) {
	url := registry(t, policy.Maven, "/com/google/code/gson/gson/maven-metadata.xml")
	b := twice(t, policy.Maven, mavenProject+mavenBuild, 20, mavenKit.use(t))
	if out := b.sh("cd /w && java -cp target/w-1.jar:$(find /root/.m2 -name gson-2.10.1.jar) W a b"); out != "[\"a\",\"b\"]\n" {
		t.Errorf("what was built says %q", out)
	}
	t.Run("and with pins where the registry gives no dates", func(t *testing.T) { mavenPins(t, b, url) })
}

// mavenPins pins what a build without a date got, as its flow log tells.
func mavenPins(t *testing.T, built box, url string) {
	t.Helper()
	if at := lastModified(t, url+"/com/google/code/gson/gson/2.10.1/gson-2.10.1.pom"); at != "" {
		t.Skipf("the registry dates its files: %s", at)
	}
	p := asOf(allow(policy.Maven), day(t, "2024-01-01"))
	pins := map[string]bool{}
	for _, e := range built.log() {
		if e.GetService() == policy.Maven && e.GetVersion() != "" {
			pins["maven:"+e.GetName()+"@"+e.GetVersion()] = true
		}
	}
	p.Pin = slices.Sorted(maps.Keys(pins))
	b := open(t, p, mavenKit.use(t))
	b.sh(mavenProject + mavenBuild + " && ls target/w-1.jar")
	b.refused("cd /w && sed -i 's/2.10.1/2.11.0/' pom.xml && "+mavenBuild, "com.google.code.gson:gson:pom:2.11.0", "403")
	b.denied(policy.Maven, "com.google.code.gson:gson", "as_of undated")
}

func TestMavenDoesNotFindWhatIsDenied(t *testing.T) {
	registry(t, policy.Maven, "/com/google/code/gson/gson/maven-metadata.xml")
	p := allow(policy.Maven)
	p.Deny = []string{"maven:com.google.code.gson:gson"}
	b := open(t, p, mavenKit.use(t))
	b.refused(mavenProject+mavenBuild, "com.google.code.gson:gson:pom:2.10.1", "403")
	b.denied(policy.Maven, "com.google.code.gson:gson", "deny maven:com.google.code.gson:gson")
}

func lastModified(t testing.TB, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(within(t, askLimit), http.MethodHead, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	return res.Header.Get("Last-Modified")
}
