"""The scheduler with a model that is a hash of the tokens it finds in the cache: any wrong page, slot or count changes the output."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from ridgeline.core.errors import OptionError
from ridgeline.llm.cache.pages import PagePool
from ridgeline.llm.engine.request import Request
from ridgeline.llm.engine.scheduler import Busy, Policy, Scheduler, StepPlan
from ridgeline.llm.sampling import Sampling
from tests.support import full_or_tenth

STOP = 0  # the token that ends a request
WRONG = 99  # a draft that is never right


def next_token(history: list[int]) -> int:
    return hash(tuple(history)) % 23


def one_at_a_time(request: Request, capacity: int) -> tuple[list[int], str]:
    """Output and finish reason with nobody else there."""
    output: list[int] = []
    while True:
        if len(request.prompt) + len(output) > capacity:
            return output, "error"
        output.append(next_token(request.prompt + output))
        if output[-1] == STOP:
            return output, "stop"
        if len(output) == request.sampling.max_tokens:
            return output, "length"


class World:
    """A pool, a scheduler, a cache of tokens, and the steps of an engine."""

    def __init__(self, pages: int, page_size: int, policy: Policy, sharing: bool = True, seed: int = 0) -> None:
        self.pool = PagePool(pages, page_size, sharing)
        self.now = 0.0
        self.scheduler = Scheduler(self.pool, policy, clock=lambda: self.now)
        self.cache: dict[int, int] = {}  # slot → token
        self.random = random.Random(seed)
        self.finished: list[Request] = []
        self.requests: list[Request] = []
        self.steps = 0
        self.hang_up = 0.0  # how likely a planned request is cancelled while its step runs

    def add(self, prompt: list[int], max_tokens: int = 8, client: str = "") -> Request:
        request = Request(str(len(self.requests)), prompt, Sampling(max_tokens=max_tokens), client, arrived=self.now)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def slot(self, request: Request, position: int) -> int:
        size = self.pool.page_size
        return request.pages[position // size] * size + position % size

    def compute(self, request: Request, count: int, room: int) -> list[int]:
        """Write the part and some drafts, read all of it back through the pages, and give the accepted tokens and the next."""
        known = request.span(request.computed, count)
        assert len(known) == count
        for offset, token in enumerate(known):
            self.cache[self.slot(request, request.computed + offset)] = token
        if request.computed + count < request.length:
            return []
        history = [self.cache[self.slot(request, position)] for position in range(request.length)]
        assert history == request.prompt + request.output, "the cache holds other tokens than the request's"
        tokens = [next_token(history)]
        for offset in range(room):
            right = self.random.random() < 0.7
            self.cache[self.slot(request, request.length + offset)] = tokens[-1] if right else WRONG
            if not right or tokens[-1] == STOP:
                break
            tokens.append(next_token(history + tokens))
        return tokens

    def step(self, extra: int = 0) -> StepPlan:
        plan = self.scheduler.plan(extra)
        self.check_plan(plan)
        new: dict[str, list[int]] = {}
        for request, count in plan.parts:
            if tokens := self.compute(request, count, plan.extra.get(request.id, 0)):
                new[request.id] = tokens
        for request, _ in plan.parts:  # a client may hang up while the step runs
            if self.random.random() < self.hang_up:
                assert self.scheduler.cancel(request.id)
        self.finished += self.scheduler.commit(plan, new, {id: "stop" for id, tokens in new.items() if STOP in tokens})
        self.steps += 1
        self.check()
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        policy = self.scheduler.policy
        assert sum(count for _, count in plan.parts) + sum(plan.extra.values()) <= policy.max_step_tokens
        assert len(plan.parts) <= len(self.scheduler.running) <= policy.places
        assert plan.parts or plan.failed or plan.wait_s > 0 or self.scheduler.idle, "a step in which nobody moved"
        kinds = [request.decoding for request, _ in plan.parts]
        assert kinds == sorted(kinds, reverse=True), "decodes come first"
        planned = {request.id for request, _ in plan.parts}
        assert all(request.id in planned for request in self.scheduler.running if request.decoding), "a decoding request was left out"
        if self.scheduler.running:
            assert self.scheduler.running[0].id in planned, "the earliest did not move"
        for request, count in plan.parts:
            tokens = request.computed + count + plan.extra.get(request.id, 0)
            assert count >= 1 and len(request.pages) == self.pool.pages_of(tokens)
        for request in plan.preempted:
            assert request.id not in planned and not request.pages and request.computed == 0
            assert all(request.order > other.order for other in self.scheduler.running), "an earlier one gave way to a later"

    def check(self) -> None:
        self.pool.check()
        running = self.scheduler.running
        assert [request.order for request in running] == sorted(request.order for request in running)
        for request in self.requests:
            assert len(request.pages) == (self.pool.pages_of(request.computed) if request.state == "running" else 0)
        holders = Counter(page for request in running for page in request.pages)
        assert self.pool._holders == [holders[page] for page in range(self.pool.pages)]
        assert self.scheduler.waiting == sum(request.state == "waiting" for request in self.requests)

    def drain(self, extra: int = 0) -> None:
        while not self.scheduler.idle:
            self.step(extra)
        assert self.pool.free == self.pool.pages, "pages were lost"

    def assert_as_alone(self) -> None:
        capacity = self.pool.pages * self.pool.page_size
        for request in self.requests:
            output, reason = one_at_a_time(request, capacity)
            if request.finish_reason == "cancelled":
                assert request.output == output[: len(request.output)]
            else:
                assert (request.output, request.finish_reason) == (output, reason)
                assert (request.error is not None) == (reason == "error")
            assert len(request.token_times) == len(request.output) and request.token_times == sorted(request.token_times)
            assert request.state == "finished"


def random_world(seed: int) -> tuple[World, int, float]:
    draw = random.Random(seed)
    policy = Policy(draw.randint(1, 8), draw.choice([1, 2, 5, 9, 16, 40]), fair=draw.random() < 0.7, max_waiting=50)
    world = World(draw.randint(3, 30), draw.randint(1, 5), policy, draw.random() < 0.8, seed)
    return world, draw.choice([0, 0, 1, 4]), draw.choice([0, 0, 0.02])


@pytest.mark.parametrize("block", range(4))
def test_outputs_are_those_of_one_at_a_time_whatever_happens(block: int) -> None:
    preempted = shared = failed = cancelled = 0
    for seed in range(block * 10_000, block * 10_000 + full_or_tenth(2000)):
        world, extra, hang_up = random_world(seed)
        draw, capacity = world.random, world.pool.pages * world.pool.page_size
        world.hang_up = hang_up
        todo = draw.randint(1, 16)
        while todo or not world.scheduler.idle:
            while todo and draw.random() < 0.4:
                prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, min(capacity, 25)))]
                world.add(prompt, draw.randint(1, 20), draw.choice("abc"))
                todo -= 1
            if hang_up and world.requests and draw.random() < 0.1:
                request = draw.choice(world.requests)
                ended = request.state == "finished"
                assert world.scheduler.cancel(request.id) is not ended
                world.check()
            world.now += 1.0
            world.step(extra)
        world.drain()
        world.assert_as_alone()
        tokens = sum(request.length for request in world.requests)
        assert world.steps <= 3 * tokens + 60, "somebody starves"
        preempted += world.scheduler.preemptions
        shared += world.pool.hit_pages
        failed += sum(request.finish_reason == "error" for request in world.requests)
        cancelled += sum(request.finish_reason == "cancelled" for request in world.requests)
    assert min(preempted, shared, failed, cancelled) > 0, "the cases do not reach what they are to test"


def test_decodes_come_first_and_prompts_take_what_is_left_of_the_budget() -> None:
    world = World(100, 4, Policy(4, 10), sharing=False)
    world.add([1] * 3, 20)
    world.step()
    long = world.add([2] * 25)
    counts = []
    while not long.output:
        counts.append([count for _, count in world.step().parts])
    assert counts == [[1, 9], [1, 9], [1, 7]]


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    world = World(100, 4, Policy())
    world.add([1] * 12, 2)
    world.drain()
    again = world.add([1] * 12, 1)
    plan = world.step()
    assert plan.parts[0][1] == 4 and again.cached_tokens == 8  # 12 are known; 8 of the first 11 are full pages
    longer = world.add([1] * 13, 1)
    assert world.step().parts == [(longer, 1)] and longer.cached_tokens == 12


def test_equal_prompts_that_arrive_together_end_up_in_the_same_pages() -> None:
    world = World(100, 4, Policy(), sharing=True)
    first, second = world.add([1] * 12, 3), world.add([1] * 12, 3)
    world.step()
    assert first.pages[:3] == second.pages[:3] and world.pool.free == 97
    world.drain()
    world.assert_as_alone()


def test_a_prefix_counts_as_found_when_its_request_comes_in() -> None:
    world = World(8, 4, Policy(max_batch=4, max_step_tokens=32))
    prompt = list(range(1, 14))
    pages = world.pool.allocate(3) or []
    world.pool.publish(prompt, pages)
    first = world.add(list(range(20, 29)), max_tokens=1)
    world.scheduler.plan()
    second = world.add([*prompt, *range(40, 47)])
    for _ in range(3):
        assert not world.scheduler.plan().parts[1:] and second.state == "waiting"  # three pages match, two more are not there
        assert world.pool.hit_pages == 0
    world.scheduler.cancel(first.id)
    world.scheduler.plan()
    assert second.state == "running" and second.cached_tokens == 12 and world.pool.hit_pages == 3


def test_clients_take_turns_and_one_client_is_served_in_order() -> None:
    world = World(100, 4, Policy(1, 64))
    many = [world.add([1], 1, "many") for _ in range(5)]
    few = [world.add([2], 1, "few") for _ in range(2)]
    world.drain()
    assert world.finished == [many[0], few[0], many[1], few[1], *many[2:]]
    world = World(100, 4, Policy(1, 64, fair=False))
    many = [world.add([1], 1, "many") for _ in range(5)]
    few = [world.add([2], 1, "few") for _ in range(2)]
    world.drain()
    assert world.finished == many + few


def unstopped(start: int, length: int, max_tokens: int) -> list[int]:
    """A prompt whose output does not stop early."""
    prompts = ([start, *[other] * (length - 1)] for other in range(1000))
    return next(prompt for prompt in prompts if one_at_a_time(Request("", prompt, Sampling(max_tokens=max_tokens)), 10**6)[1] == "length")


def test_the_latest_gives_way_keeps_its_output_and_comes_back_first() -> None:
    world = World(6, 2, Policy(2, 64), sharing=False)
    early, late = world.add(unstopped(1, 3, 9), 9, "a"), world.add(unstopped(2, 3, 9), 9, "b")
    behind = world.add([5], 1, "b")
    kept: list[int] = []
    plan = StepPlan()
    while not plan.preempted:
        kept = list(late.output)
        plan = world.step()
    assert plan.preempted == [late] and late.output == kept != [] and early.state == "running"
    after = world.add([4], 1, "c")
    assert list(world.scheduler._lines["b"]) == [late, behind] and next(iter(world.scheduler._lines)) == "b"
    world.drain()
    world.assert_as_alone()
    assert late.preemptions == 1 and early.preemptions == 0 and after in world.finished
    assert after.admitted_at is not None and world.finished.index(early) == 0


def test_a_request_larger_than_the_cache_is_refused_or_ends_with_an_error() -> None:
    world = World(3, 2, Policy())
    with pytest.raises(OptionError, match="holds 6"):
        world.add([1] * 7)
    request = world.add([1, 2, 1, 2], 50)
    world.drain()
    assert request in world.finished and request.finish_reason == "error" and len(request.output) == 3
    assert request.error is not None and "holds 6 tokens" in request.error
    assert world.add([1] * 6, 1) and world.step().parts  # exactly the cache is served


def test_empty_prompts_and_ids_in_use_are_refused() -> None:
    world = World(3, 2, Policy())
    world.add([1])
    with pytest.raises(OptionError, match="not finished yet"):
        world.scheduler.add(Request("0", [1], Sampling()))
    with pytest.raises(OptionError, match="empty prompt"):
        world.add([])
    assert world.scheduler.waiting == 1


def test_a_full_line_is_busy_and_running_requests_are_not_in_it() -> None:
    world = World(20, 2, Policy(2, 8, max_waiting=2))
    world.add([1]), world.add([2])
    with pytest.raises(Busy, match="2 requests are waiting") as error:
        world.add([3])
    assert isinstance(error.value, OptionError)
    world.step()
    world.add([3]), world.add([4])
    world.drain()
    assert len(world.finished) == 4


def test_a_step_is_held_back_until_the_batch_is_full_or_the_time_is_up() -> None:
    world = World(50, 2, Policy(3, 64, max_wait_s=5.0))
    assert world.scheduler.plan().wait_s == 0  # nobody waits: nothing to hold back
    world.add([1])
    world.now = 2.0
    plan = world.step()
    assert plan.wait_s == 3.0 and not plan.parts
    world.now = 5.0
    assert len(world.step().parts) == 1
    world.add([2])
    assert len(world.step().parts) == 2  # something runs: no holding back
    world.drain()
    for token in range(3):
        world.add([token + 3])
    assert len(world.step().parts) == 3  # full: at once


def test_cancel_returns_the_pages_in_every_state() -> None:
    world = World(20, 2, Policy(2, 4), sharing=False)
    requests = [world.add([1] * 6) for _ in range(3)]
    world.step()
    assert requests[0].pages and requests[2].state == "waiting"
    for request in requests:
        assert world.scheduler.cancel(request.id) and not world.scheduler.cancel(request.id)
        world.check()
    assert world.pool.free == 20 and world.scheduler.idle and not world.scheduler.cancel("never was")
    assert all(request.finish_reason == "cancelled" and request.finished_at is not None for request in requests)
    plan_after = world.scheduler.plan()
    assert not plan_after.parts


def test_a_request_cancelled_while_its_step_runs_is_passed_over() -> None:
    world = World(20, 2, Policy())
    request = world.add([1] * 6)
    plan = world.scheduler.plan()
    world.scheduler.cancel(request.id)
    assert world.scheduler.commit(plan, {request.id: [5]}) == [] and request.output == []
    assert world.pool.free == 20


def test_lookahead_is_reserved_shared_out_and_given_back() -> None:
    world = World(20, 2, Policy(4, 8), sharing=False)
    first, second = world.add([1], 20), world.add([2], 20)
    world.step()
    plan = world.scheduler.plan(extra=5)
    assert plan.extra == {first.id: 3, second.id: 3}  # 8 tokens: one each and three ahead
    assert len(first.pages) == world.pool.pages_of(1 + 1 + 3)
    world.scheduler.commit(plan, {first.id: [5, 6, 7, 8], second.id: [5]})
    assert first.computed == 5 and second.computed == 2 and len(second.pages) == 1 and second.remaining == 1
    world.check()
    plan = world.scheduler.plan(extra={second.id: 2})
    assert plan.extra == {second.id: 2}


def test_lookahead_takes_no_pages_from_others_and_stops_at_max_tokens() -> None:
    world = World(2, 2, Policy(4, 64), sharing=False)
    request = world.add([1], 20)
    world.step()
    assert world.scheduler.plan(extra=9).extra == {request.id: 2}  # 4 slots: two for what is known
    world = World(20, 2, Policy(4, 64), sharing=False)
    request = world.add([1], 4)
    world.step()
    assert world.scheduler.plan(extra=9).extra == {request.id: 2}  # one is there, one comes anyway


def test_output_is_cut_at_max_tokens_even_behind_a_stop() -> None:
    for tokens, reason, kept, ends in [
        ([5, 6, STOP], "stop", [5, 6], "length"), ([5, STOP], "stop", [5, STOP], "stop"), ([5, 6], None, [5, 6], "length"),
    ]:  # fmt: skip
        world = World(20, 2, Policy())
        request = world.add([1], 2)
        plan = world.scheduler.plan()
        finished = world.scheduler.commit(plan, {request.id: tokens}, {request.id: reason} if reason else None)  # type: ignore[dict-item]
        assert finished == [request] and request.output == kept and request.finish_reason == ends


def test_a_sampled_token_is_never_forgotten() -> None:
    world = World(20, 2, Policy())
    world.add([1])
    with pytest.raises(AssertionError, match="got no token"):
        world.scheduler.commit(world.scheduler.plan(), {})


@pytest.mark.parametrize("change", [{"max_batch": 0}, {"max_step_tokens": 0}, {"max_wait_s": -1.0}, {"max_waiting": 0}])
def test_policies_that_make_no_sense_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(change))):
        replace(Policy(), **change)  # type: ignore[arg-type]


def test_span_reads_across_prompt_and_output() -> None:
    request = Request("r", [1, 2, 3], Sampling(), output=[4, 5])
    everything = [1, 2, 3, 4, 5]
    for start in range(5):
        for count in range(6 - start):
            assert request.span(start, count) == everything[start : start + count]
    assert request.length == 5 and request.remaining == 5 and not request.decoding
