package cgroup

import (
	"os"
	"testing"

	"github.com/sandsea/sandsea/internal/testkit/leak"
)

func TestMain(m *testing.M) { os.Exit(leak.Main(m)) }
