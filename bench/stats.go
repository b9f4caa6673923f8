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

// ratio is how many times faster a is than b at the median, with bounds that hold in 95 of 100 cases: whole rounds are
// drawn anew, for both alike, since samples of one round resemble each other.
func ratio(a, b [][]time.Duration, random *rand.Rand) (value, low, high float64, ok bool) {
	n := min(len(a), len(b))
	whole := make([]int, n)
	for i := range whole {
		whole[i] = i
	}
	value, ok = ratioOf(a, b, whole)
	if !ok {
		return 0, 0, 0, false
	}
	all := make([]float64, 0, draws)
	pick := make([]int, n)
	for range draws {
		for i := range pick {
			pick[i] = random.IntN(n)
		}
		if v, ok := ratioOf(a, b, pick); ok {
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

func ratioOf(a, b [][]time.Duration, rounds []int) (float64, bool) {
	ma, mb := medianOf(a, rounds), medianOf(b, rounds)
	return float64(mb) / float64(ma), ma > 0 && mb > 0
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
