// A grid on the host, for tests: threads run one after another; the lanes of a warp are coroutines
// if they exchange values. Only host compilers compile this file.
#ifndef GPUCOLL_HOST_GRID_H
#define GPUCOLL_HOST_GRID_H

#include <ucontext.h>

namespace gpucoll {

template <class Body>
inline void run_grid(uint32 blocks, Body body) {
    place.blocks = blocks;
    for (place.block = 0; place.block < blocks; ++place.block)
        for (place.thread = 0; place.thread < THREADS; ++place.thread) body();
}

struct Warp {
    static constexpr unsigned long STACK_BYTES = 64 << 10;
    ucontext_t scheduler, lanes[WARP];
    bool is_done[WARP];
    uint32 given[2][WARP];  // values of this exchange and of the previous one, alternately
    uint32 turn[WARP];
    uint32 current;
    void (*run)(void*);
    void* body;
    alignas(64) char stacks[WARP][STACK_BYTES];
};

inline thread_local Warp* warp = nullptr;

inline void enter_lane() {
    warp->run(warp->body);
    warp->is_done[warp->current] = true;
}

inline void resume_lane(uint32 first_thread, uint32 lane) {
    warp->current = lane;
    place.thread = first_thread + lane;
    swapcontext(&warp->scheduler, &warp->lanes[lane]);
}

/* A lane gives its value, lets all other lanes give theirs, and takes the value of another lane. */
inline uint32 exchange_lanes(uint32 value, uint32 mask) {
    const uint32 lane = warp->current, turn = warp->turn[lane]++ % 2;
    warp->given[turn][lane] = value;
    swapcontext(&warp->lanes[lane], &warp->scheduler);
    return warp->given[turn][lane ^ mask];
}

template <class Body>
inline void run_warp(uint32 first_thread, Body& body) {
    warp->run = [](void* pointer) { (*(Body*)pointer)(); };
    warp->body = &body;
    for (uint32 lane = 0; lane < WARP; ++lane) {
        ucontext_t& context = warp->lanes[lane];
        getcontext(&context);
        context.uc_stack.ss_sp = warp->stacks[lane];
        context.uc_stack.ss_size = Warp::STACK_BYTES;
        context.uc_link = &warp->scheduler;
        warp->is_done[lane] = false;
        warp->turn[lane] = 0;
        makecontext(&context, enter_lane, 0);
    }
    for (bool is_busy = true; is_busy;) {
        is_busy = false;
        for (uint32 lane = 0; lane < WARP; ++lane) {
            if (warp->is_done[lane]) continue;
            resume_lane(first_thread, lane);
            is_busy = true;
        }
    }
}

template <class Body>
inline void run_grid_of_warps(uint32 blocks, Body body) {
    warp = new Warp;
    place.blocks = blocks;
    for (place.block = 0; place.block < blocks; ++place.block)
        for (uint32 first = 0; first < THREADS; first += WARP) run_warp(first, body);
    delete warp;
}

}  // namespace gpucoll

#endif
