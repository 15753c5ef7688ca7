/* A word {value, waiters} that others wait for: no wake-up is lost (flags.signal and flags.wait_long).
 * The rank that signals counts up, and goes on when all have seen it; README.md has the names.
 */
#ifndef WAITERS
#define WAITERS 2
#endif
#define M 8
#define BEHIND(value, target) (((value) + M - (target)) % M >= M / 2)

byte value, waiters;
byte reached[WAITERS];
bit is_asleep[WAITERS];			/* in the kernel, on the word's futex */

inline wake() {				/* FUTEX_WAKE */
  atomic {
    i = 0;
    do :: i < WAITERS -> is_asleep[i] = 0; i++ :: else -> break od;
    i = 0
  }
}

active proctype signals() {
  byte i, next, looked;
  do
  :: next = (value + 1) % M;
     i = 0;				/* a wake-up that is lost is not made good by the next one */
     do
     :: i < WAITERS -> !BEHIND(reached[i], (next + M - 1) % M); i++
     :: else -> break
     od;
     i = 0;
#ifdef PLAIN_STORE
     looked = waiters;			/* the store becomes visible after this load */
     value = next;
#else
     value = next;			/* exchange32 or exchange64: a full fence */
     looked = waiters;			/* load32_ordered */
#endif
     if
     :: looked > 0 -> wake()
     :: else
     fi;
     looked = 0; next = 0
  od
}

proctype waits(byte me) {
  byte target, seen;
  do
  :: target = (reached[me] + 1) % M;
     do
     :: !BEHIND(value, target) -> break
     :: else ->				/* flags._sleep_slice, of which no slice ever ends */
#ifdef LATE_ANNOUNCEMENT
        seen = value;			/* the addition becomes visible after this load */
        waiters++;
#else
        waiters++;			/* add32: a full fence */
        seen = value;			/* load32_ordered */
#endif
        if
        :: BEHIND(seen, target) ->
#ifdef SLEEP_WITHOUT_COMPARING
           is_asleep[me] = 1;
#else
           atomic { if :: value == seen -> is_asleep[me] = 1 :: else fi };	/* FUTEX_WAIT */
#endif
           !is_asleep[me]
        :: else
        fi;
        waiters--; seen = 0
     od;
     reached[me] = target; target = 0
  od
}

init {
  byte r;
  atomic { do :: r < WAITERS -> run waits(r); r++ :: else -> break od }
}
