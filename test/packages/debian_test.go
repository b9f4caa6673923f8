package packages

import (
	"testing"

	"github.com/sandsea/sandsea/internal/policy"
)

// apt is a line that installs what is added to it. The image's list has a host that this machine's may lack; what no rule
// allows does not resolve, which apt takes for a whim of the network and tries again.
const (
	once = "export DEBIAN_FRONTEND=noninteractive; echo 'Acquire::Retries 0;' >/etc/apt/apt.conf.d/90once; "
	apt  = once + "apt-get -q update && apt-get -q install -y --no-install-recommends "
)

func TestAptInstallsFromTheImagesOwnSourcesAndTheSecondTimeFromTheCache(t *testing.T) {
	registry(t, policy.Debian, "/dists/bookworm/InRelease")
	b := twice(t, policy.Debian, apt+"hello tree jq", 4)
	b.sh("hello && tree --version && echo {} | jq .")
}

func TestAptFindsNoSuiteOfAfterTheDate(t *testing.T) {
	registry(t, policy.Debian, "/dists/bookworm/InRelease")
	b := open(t, asOf(allow(policy.Debian), day(t, "2023-01-01")))
	b.refused(once+"apt-get update", "403", "bookworm InRelease")
	b.denied(policy.Debian, "bookworm/InRelease", "as_of 2023-01-01")
}

func TestAptIsRefusedADeniedPackage(t *testing.T) {
	registry(t, policy.Debian, "/dists/bookworm/InRelease")
	p := allow(policy.Debian)
	p.Deny = []string{"debian:jq"}
	b := open(t, p)
	b.sh(apt + "hello")
	b.refused("apt-get install -y --no-install-recommends jq", "403", "jq")
	b.denied(policy.Debian, "jq", "deny debian:jq")
}
