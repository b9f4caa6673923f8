package runner

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/sandsea/sandsea/internal/chronus"
	"github.com/sandsea/sandsea/internal/chronus/sessions"
)

func TestAnEndGivesWayToStartsForALittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var tr traffic
		took := func() time.Duration {
			begin := time.Now()
			tr.yield(yieldLimit)
			return time.Since(begin)
		}
		if d := took(); d != 0 {
			t.Errorf("waited %s for nothing", d)
		}
		one, two := tr.begin(), tr.begin()
		time.AfterFunc(2*time.Millisecond, one)
		time.AfterFunc(5*time.Millisecond, two)
		if d := took(); d != 5*time.Millisecond {
			t.Errorf("waited %s for the last of two starts, which takes 5 ms", d)
		}
		end := tr.begin()
		if d := took(); d != yieldLimit {
			t.Errorf("waited %s for a start that takes long", d)
		}
		end()
		if d := took(); d != 0 {
			t.Errorf("waited %s after the last start", d)
		}
	})
}

func TestUsersOfAnImageAreRememberedWithinBounds(t *testing.T) {
	var u users
	key := userKey(nil, "root")
	user := sessions.User{IDs: chronus.IDs{Groups: []uint32{0, 5}}, Name: "root", Home: "/root"}
	u.put(key, user)
	got, ok := u.get(key)
	if !ok || len(got.IDs.Groups) != 2 {
		t.Fatalf("got %+v, %v", got, ok)
	}
	// Who gets a user may change what it got.
	got.IDs.Groups[0] = 77
	user.IDs.Groups[1] = 77
	if again, _ := u.get(key); again.IDs.Groups[0] == 77 || again.IDs.Groups[1] == 77 {
		t.Errorf("what is remembered was changed from outside: %+v", again)
	}
	if _, ok := u.get(userKey(nil, "other")); ok {
		t.Error("a user nobody put is there")
	}
	for i := range 2 * usersMost {
		u.put(userKey(nil, time.Duration(i).String()), user)
	}
	if n := len(u.known); n > usersMost {
		t.Errorf("%d are remembered", n)
	}
}
