/* grow() on one host: the old ranks go over to the new communicator together or not at all, whoever
 * dies (api/growing.py, api/joining.py, group/growth.py); README.md has the names.
 */
#ifndef P
#define P 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define OLD ((1 << P) - 1)
#define ALL ((1 << (P + 1)) - 1)
#define NEWCOMER P
#define BIT(rank) (1 << (rank))
#define HAS(mask, rank) (((mask) >> (rank)) & 1)
#define NONE 0
#define FAILED 1
#define MADE 2
#define WENT 1						/* has the new communicator, and has closed the old one */
#define STAYED 2					/* has the old one; it is broken if a rank of it has died */

#if P == 2
#define SOME(what) (came_to[1] == what)
#define NONE_WILL_GO (HAS(dead, 1) || came_to[1] == STAYED)
#else
#define SOME(what) (came_to[1] == what || came_to[2] == what)
#define NONE_WILL_GO ((HAS(dead, 1) || came_to[1] == STAYED) && (HAS(dead, 2) || came_to[2] == STAYED))
#endif

byte dead, killed;					/* a bit for each: pidfds, and connections that end */
byte ready, told;					/* of the meeting: has its part; was told that all have */
bool given_up, aborted;					/* the meeting; the old communicator */
bool says_made;						/* the newcomer, at the door */
byte entered, votes;					/* of the exchange of votes, on the old communicator */
byte settled = NONE;					/* EVENT_GROWTH */
byte came_to[P + 1];
bool let_in;						/* rank 0's last word at the door */

inline may_die() {
  if
  :: killed < KILLS -> atomic { killed++; dead = dead | BIT(me); goto ended }
  :: skip
  fi
}

inline settle(wanted) {
#ifdef EACH_FOR_ITSELF
  decided = wanted
#else
  atomic {
    if
    :: settled == NONE -> settled = wanted
    :: else -> skip
    fi;
    decided = settled
  }
#endif
}

inline let_newcomer_in() {
  if
  :: me == 0 -> let_in = true
  :: else -> skip
  fi
}

proctype old_rank(byte me) {
  bool has_made = false, has_all = false;
  byte decided = NONE, place;
  may_die();
  ready = ready | BIT(me);
  if
  :: me == 0 ->
    if
    :: ready == ALL ->
      place = 1;
      do
      :: place <= P -> told = told | BIT(place); place++; may_die()
      :: else -> break
      od;
#ifdef LETS_IN_FIRST
      let_newcomer_in();
#endif
      if
      :: says_made -> has_made = true
      :: HAS(dead, NEWCOMER) -> skip
      fi
    :: dead != 0 -> given_up = true
    fi
  :: else ->
    if
    :: HAS(told, me) -> has_made = true
    :: given_up -> skip
    :: HAS(dead, 0) && !HAS(told, me) -> skip
    fi
  fi;
  may_die();
  atomic { votes = votes | (has_made << me); entered = entered | BIT(me) }
  may_die();
  if
  :: entered == OLD -> has_all = true
  :: (dead & OLD) != 0 || aborted -> aborted = true
  fi;
  may_die();
  if
  :: has_all && votes == OLD -> settle(MADE)
  :: !has_all && has_made -> settle(FAILED)
  :: else -> skip
  fi;
  may_die();
  if
  :: decided == MADE ->
    let_newcomer_in();
    came_to[me] = WENT
  :: else ->
    came_to[me] = STAYED
  fi;
ended:
  skip
}

proctype newcomer(byte me) {
  may_die();
  ready = ready | BIT(me);
  if
  :: HAS(told, me) ->
    may_die();
    says_made = true;
    may_die();
    if
    :: let_in -> came_to[me] = WENT
    :: !let_in && came_to[0] == STAYED -> came_to[me] = STAYED
    :: !let_in && HAS(dead, 0) ->
      /* The others show whether they have gone over: those that have not leave what they have made. */
      if
      :: SOME(WENT) -> came_to[me] = WENT
      :: NONE_WILL_GO -> came_to[me] = STAYED
      fi
    fi
  :: given_up -> came_to[me] = STAYED
  :: HAS(dead, 0) && !HAS(told, me) -> came_to[me] = STAYED
  fi;
ended:
  skip
}

#define LIVES(rank) (HAS(dead, rank) == 0)
#define DIFFER(a, b) (LIVES(a) && LIVES(b) && came_to[a] != came_to[b])

init {
  byte rank;
  atomic {
    rank = 0;
    do
    :: rank < P -> run old_rank(rank); rank++
    :: else -> break
    od;
    run newcomer(NEWCOMER)
  }
  (_nr_pr == 1);
  /* All old ranks that live have come to the same, and the newcomer to nothing else. */
  rank = 0;
  do
  :: rank < P -> assert(!DIFFER(rank, (rank + 1) % P)); rank++
  :: else -> break
  od;
  assert(!LIVES(NEWCOMER) || came_to[NEWCOMER] != WENT || SOME(WENT) || came_to[0] == WENT || (dead & OLD) == OLD);
  assert(!LIVES(NEWCOMER) || came_to[NEWCOMER] != STAYED || (!(SOME(WENT) && LIVES(1)) && !(came_to[0] == WENT && LIVES(0))));
  /* A newcomer that dies alone leaves the old communicator whole. */
  assert((dead & OLD) != 0 || !aborted)
}
