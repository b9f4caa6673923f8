package errwire

import (
	"strconv"
	"strings"
	"time"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// clip takes the object and the hint off a sentence, since Error() of the restored error adds them again.
func clip(message string, d *sandseav1.ErrorDetail) string {
	if d.GetObject() != "" {
		message = strings.TrimPrefix(message, d.GetObject())
		message = strings.TrimPrefix(strings.TrimPrefix(message, ":"), " ")
	}
	return strings.TrimSuffix(message, ". "+d.GetHint())
}

// retryAfter is the header's form: whole seconds, at least one.
func retryAfter(d time.Duration) string {
	return strconv.Itoa(max(1, int((d+time.Second-1)/time.Second)))
}
