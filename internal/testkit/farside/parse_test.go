package farside

import (
	"encoding/hex"
	"testing"
)

func TestTheLinksOwnTalkIsToldFromTheRest(t *testing.T) {
	// A report of multicast listeners as Linux sends it a second after a link came up, and the same bytes as an echo.
	const head, options, report = "6000000000380001fe80000000000000a06464fffefa997aff020000000000000000000000000016", "3a00050200000100",
		"8f0036a00000000204000000ff0200000000000000000001fffa997a04000000ff0200000000000000000001ff000001"
	for text, own := range map[string]bool{
		head + options + report:            true,
		head + options + "80" + report[2:]: false,
		head + "1100050200000100" + report: false, // UDP behind the same options
		head + options:                     false,
	} {
		raw, err := hex.DecodeString(text)
		if err != nil {
			t.Fatal(err)
		}
		if p, ok := parse(raw); !ok || p.own != own {
			t.Errorf("%s: own %v, read %v; want own %v", text, p.own, ok, own)
		}
	}
}
