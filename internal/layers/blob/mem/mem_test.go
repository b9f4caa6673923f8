package mem_test

import (
	"testing"

	"github.com/sandsea/sandsea/internal/layers/blob"
	"github.com/sandsea/sandsea/internal/layers/blob/conform"
	"github.com/sandsea/sandsea/internal/layers/blob/mem"
)

func TestConformance(t *testing.T) {
	conform.Run(t, func(*testing.T) blob.Store { return &mem.Store{} })
}
