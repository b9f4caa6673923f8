package keeper_test

import (
	"testing"

	"github.com/sandsea/sandsea/internal/keeper"
	"github.com/sandsea/sandsea/internal/keeper/conform"
)

func TestTheKeeperProcessConforms(t *testing.T) {
	conform.Run(t, func(t *testing.T) conform.Dial { return keeper.FreshKeeper(t) })
}
