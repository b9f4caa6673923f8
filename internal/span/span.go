// Package span words spans of time for people.
package span

import (
	"fmt"
	"time"
)

// Short is a span in one unit, cut off: "2s", "3m", "2h", "5d". What is below 0 counts as 0.
func Short(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(max(d, 0).Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
