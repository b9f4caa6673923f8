package bench

import (
	"math"
	"math/rand/v2"
	"slices"
	"time"
)

// draws is how often the rounds are drawn anew for an interval.
const draws = 1000

// Percentile is the nearest rank: the least sample that at least p percent of them do not exceed. sorted must be sorted
// and not empty, p in (0, 100].
func Percentile(sorted []time.Duration, p float64) time.Duration {
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// Distribution is a Result over samples, in milliseconds.
func Distribution(metric, of string, samples []time.Duration) Result {
	return distribution(metric, of, slices.Clone(samples))
}

// Value is a Result of one figure: the median of what was found in so many rounds, at least one.
func Value(metric, of, unit string, rounds ...float64) Result {
	v := round3(median(rounds))
	return Result{Metric: metric, Of: of, Unit: unit, N: len(rounds), Value: &v}
}

func distribution(metric, of string, samples []time.Duration) Result {
	r := Result{Metric: metric, Of: of, Unit: "ms", N: len(samples)}
	if len(samples) == 0 {
		return r
	}
	slices.Sort(samples)
	at := func(p float64) *float64 {
		v := round3(float64(Percentile(samples, p)) / float64(time.Millisecond))
		return &v
	}
	r.P50, r.P90, r.P99, r.Max = at(50), at(90), at(99), at(100)
	return r
}

// comparison is what two medians say about each other; false: nothing.
type comparison func(a, b time.Duration) (float64, bool)

// faster is how many times faster the first is.
func faster(a, b time.Duration) (float64, bool) { return float64(b) / float64(a), a > 0 && b > 0 }

// added is how many milliseconds the first takes more.
func added(a, b time.Duration) (float64, bool) {
	return float64(a-b) / float64(time.Millisecond), a > 0 && b > 0
}

// compare gives what c says of the medians of a and b, with bounds that hold in 95 of 100 cases: whole rounds are drawn
// anew, for both alike, since samples of one round resemble each other.
func compare(a, b [][]time.Duration, c comparison, random *rand.Rand) (value, low, high float64, ok bool) {
	n := min(len(a), len(b))
	whole := make([]int, n)
	for i := range whole {
		whole[i] = i
	}
	of := func(rounds []int) (float64, bool) { return c(medianOf(a, rounds), medianOf(b, rounds)) }
	value, ok = of(whole)
	if !ok {
		return 0, 0, 0, false
	}
	all := make([]float64, 0, draws)
	pick := make([]int, n)
	for range draws {
		for i := range pick {
			pick[i] = random.IntN(n)
		}
		if v, ok := of(pick); ok {
			all = append(all, v)
		}
	}
	slices.Sort(all)
	at := func(p float64) float64 {
		rank := int(math.Ceil(p / 100 * float64(len(all))))
		return all[min(max(rank, 1), len(all))-1]
	}
	return value, at(2.5), at(97.5), true
}

func medianOf(samples [][]time.Duration, rounds []int) time.Duration {
	var all []time.Duration
	for _, i := range rounds {
		all = append(all, samples[i]...)
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return Percentile(all, 50)
}

func median(values []float64) float64 {
	v := slices.Sorted(slices.Values(values))
	return v[(len(v)+1)/2-1]
}

func round3(v float64) float64 { return math.Round(v*1000) / 1000 }
