/* shrink() on one host: the ranks that are left agree who they are, and all have the new communicator
 * or none has (group/host/shrinking.py); README.md has the names.
 */
#ifndef P
#define P 3
#endif
#ifndef KILLS
#define KILLS 1
#endif
#define ALL ((1 << P) - 1)
#ifndef ROUNDS
#define ROUNDS 2
#endif
#define BIT(rank) (1 << (rank))
#define HAS(mask, rank) (((mask) >> (rank)) & 1)
#define COUNT(mask) (HAS(mask, 0) + HAS(mask, 1) + HAS(mask, 2) + HAS(mask, 3))
#define LOWEST(mask) ((mask) & (~(mask) + 1))
#define ENOUGH(left, former) (2 * COUNT(left) > COUNT(former) || \
  (2 * COUNT(left) == COUNT(former) && ((left) & LOWEST(former))))
#define MEETING 0
#define MADE 1
#define FAILED 2
#define LEFT 9
#ifdef ONE_PROPOSAL
#define PLACE(rank, round) (rank)
#else
#define PLACE(rank, round) (2 * (rank) + (round) % 2)
#endif

byte word_round, word_rank, word_phase = FAILED;	/* one word: EVENT_SURVIVORS */
byte said[P];						/* SHRINKING_ROUND */
byte proposals[2 * P];
byte ready[P];						/* over the connections of a meeting */
byte dead;						/* a bit for each rank: pidfds */
byte killed;
byte goes_on[P];					/* with whom a rank has a new communicator */
byte raised;						/* a bit for each rank that got ShrinkError */

inline may_die() {
  if
  :: killed < KILLS -> atomic { killed++; dead = dead | BIT(me); goto ended }
  :: skip
  fi
}

#define SAME (word_round == round && word_rank == rank && word_phase == phase)
#ifdef UNCHECKED
#define CHECK skip
#else
#define CHECK if :: SAME -> skip :: else -> goto again fi
#endif

proctype survivor(byte me) {
  byte round, rank, phase, mask, present, other;
again:
  atomic { mask = 0; present = 0; other = 0; round = word_round; rank = word_rank; phase = word_phase }
  may_die();
  if
  :: phase == FAILED && round == 0 -> mask = ALL
  :: else ->
     mask = proposals[PLACE(rank, round)];
     CHECK;
     if
     :: !HAS(mask, me) || phase == MADE -> goto left_behind
     :: else
     fi
  fi;
  if
  :: phase == MEETING -> goto meet
  :: else
  fi;
  if
  :: round == ROUNDS -> goto ended			/* enough was explored */
  :: else
  fi;
  said[me] = round + 1;
  other = 0;
  do							/* standing: one after the other */
  :: other < P ->
     atomic {
       if
       :: HAS(mask, other) && !HAS(dead, other) && said[other] == round + 1 ->
	  present = present | BIT(other)
       :: HAS(mask, other) && !HAS(dead, other) && said[other] < round + 1 ->
	  /* not there: its time may be up, or it comes, or something else has happened */
	  if
	  :: skip
	  :: !SAME || said[other] >= round + 1 || HAS(dead, other) -> goto again
	  fi
       :: else
       fi
     };
     other++
  :: else -> break
  od;
  may_die();
  if
  :: !ENOUGH(present, mask) ->
     CHECK;
     atomic { raised = raised | BIT(me); said[me] = LEFT; goto ended }
  :: else
  fi;
  proposals[PLACE(me, round + 1)] = 0;			/* not in one piece */
  proposals[PLACE(me, round + 1)] = present;
  atomic {
    if
#ifdef BLIND
    :: true -> word_round = round + 1;
#endif
    :: SAME -> word_round = round + 1; word_rank = me; word_phase = MEETING
    :: else
    fi
  };
  goto again;

meet:
  may_die();
  if
  :: BIT(me) == LOWEST(mask) ->				/* the new rank 0: all the others are ready */
     other = 0;
     do
     :: other < P ->
	if
	:: other == me || !HAS(mask, other) -> skip
	:: ready[other] == round -> skip
	:: goto give_up					/* it is gone, or late */
	fi;
	other++
     :: else -> break
     od;
     may_die();
     atomic {						/* commit */
       if
       :: SAME -> word_phase = MADE; goes_on[me] = mask; goto ended
       :: else -> goto again
       fi
     }
  :: else ->
     ready[me] = round;
     if
     :: word_round == round && word_phase == MADE -> goes_on[me] = mask; goto ended
     :: goto give_up					/* rank 0 is gone, or late */
     fi
  fi;

give_up:
  may_die();
#ifdef NOT_SAID
  goto ended;						/* it undoes its part, and tells nobody */
#endif
  atomic {						/* abandon */
    if
    :: SAME -> word_phase = FAILED
    :: word_round == round && word_phase == MADE -> goes_on[me] = mask; goto ended
    :: else
    fi
  };
  goto again;

left_behind:
  raised = raised | BIT(me);
ended:
  skip
}

active proctype judge() {
  byte one, other;
  atomic { one = 0; do :: one < P -> run survivor(one); one++ :: else -> break od; one = 0 };
  timeout;						/* nothing goes on any more */
  atomic {
    do
    :: one < P ->
       other = 0;
       do
       :: other < P ->
	  /* one list, and no rank on it that lives has anything else */
	  assert(!goes_on[one] || !goes_on[other] || goes_on[one] == goes_on[other]);
	  assert(!goes_on[one] || !HAS(goes_on[one], other) || HAS(dead, other) || goes_on[other]);
	  assert(!goes_on[one] || HAS(goes_on[one], one));
	  other++
       :: else -> break
       od;
       one++
    :: else -> break
    od
  }
}
