package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
	"github.com/sandsea/sandsea/internal/testkit/testserver"
)

// What may leave a sandbox, asked and changed from outside.
func ExampleSandbox_SetPolicy() {
	ctx := context.Background()
	c, err := client.New(client.Config{})
	if err != nil {
		log.Fatal(err)
	}
	sb, err := c.Create(ctx, &sandseav1.SandboxSpec{Environment: &sandseav1.Environment{Image: "py"}}, "")
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Stop(ctx)
	if _, err := sb.SetPolicy(ctx, &sandseav1.NetworkPolicy{
		Services: map[string]bool{"pypi": true},
		AsOf:     timestamppb.New(time.Date(2024, 6, 1, 0, 0, 0, 0, time.UTC)),
		Deny:     []string{"pypi:flask"},
		Phases: []*sandseav1.NetworkPhase{
			{Name: "agent", Rules: []*sandseav1.NetworkRule{{Target: &sandseav1.NetworkRule_Domain{Domain: "example.org"}}}},
			{Name: "grade"},
		},
	}); err != nil {
		log.Fatal(err)
	}
	ask := func(q *sandseav1.CheckNetworkRequest) {
		answer, err := sb.Check(ctx, q)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(answer.GetAllowed(), answer.GetRule())
	}
	ask(&sandseav1.CheckNetworkRequest{Host: "example.org"})
	ask(&sandseav1.CheckNetworkRequest{Service: "pypi", Package: "Flask"})
	if _, err := sb.SetPhase(ctx, "grade"); err != nil {
		log.Fatal(err)
	}
	ask(&sandseav1.CheckNetworkRequest{Host: "example.org"})
	// Output:
	// true domain example.org
	// false deny pypi:flask
	// false default reject
}

func TestPolicyIsShownAsItIsInForce(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	info, err := sb.SetPolicy(t.Context(), &sandseav1.NetworkPolicy{
		Phases: []*sandseav1.NetworkPhase{{Name: "agent"}, {Name: "grade"}}, Phase: "grade",
	})
	if err != nil || info.GetNetworkPhase() != "grade" || len(info.GetSpec().GetNetwork().GetPhases()) != 2 {
		t.Errorf("%v, %v", info, err)
	}
	if info, err = sb.SetPhase(t.Context(), "agent"); err != nil || info.GetNetworkPhase() != "agent" {
		t.Errorf("%v, %v", info, err)
	}
	if _, err = sb.SetPhase(t.Context(), "none"); !errors.Is(err, errdefs.NotFound) {
		t.Errorf("a phase that is not there: %v", err)
	}
	_, err = sb.SetPolicy(t.Context(), &sandseav1.NetworkPolicy{Services: map[string]bool{"pipy": true}})
	if !errors.Is(err, errdefs.Invalid) {
		t.Errorf("a service that is none: %v", err)
	}
	if info, err = sb.Info(t.Context()); err != nil || info.GetNetworkPhase() != "agent" {
		t.Errorf("after refusals: %v, %v", info, err)
	}
}

func TestLogGoesOnWhereItBroke(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	const n = 20
	for i := range n {
		s.Flow(sb.ID, &sandseav1.NetworkEvent{Name: fmt.Sprint(i), Denied: i%2 > 0})
	}
	next, seen, breaks := int64(0), 0, 0
	for over := false; !over; {
		for m, err := range sb.Log(t.Context(), &sandseav1.NetworkLogRequest{FromSeq: next, Follow: true}) {
			if errors.Is(err, errdefs.Unavailable) {
				breaks++
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range m.GetEvents() {
				if e.GetSeq() != int64(seen) || e.GetName() != fmt.Sprint(seen) {
					t.Fatalf("event %d is %v", seen, e)
				}
				seen++
			}
			if next = m.GetNextSeq(); seen == n && breaks == 0 {
				s.CutLinks()
			}
			if seen == n+1 {
				over = true
				break
			}
		}
		if breaks == 1 && seen == n {
			s.Flow(sb.ID, &sandseav1.NetworkEvent{Name: fmt.Sprint(n)})
		}
	}
	denied := 0
	for m, err := range sb.Log(t.Context(), &sandseav1.NetworkLogRequest{Denied: true}) {
		if err != nil {
			t.Fatal(err)
		}
		denied += len(m.GetEvents())
	}
	if denied != n/2 || breaks != 1 {
		t.Errorf("%d denied, %d breaks", denied, breaks)
	}
}

func TestAnEndpointOfLessThanAMillisecondIsNotOneForLife(t *testing.T) {
	s := testserver.Start(t, testserver.Config{})
	sb := create(t, connectTo(t, s))
	e, err := sb.Endpoint(t.Context(), 8000, time.Microsecond)
	if err != nil {
		t.Fatal(err)
	}
	if at := e.GetExpiresAt(); at == nil || time.Until(at.AsTime()) > time.Minute {
		t.Errorf("it ends at %v", at)
	}
}
