"""The whole ring in one process on a simulated clock: real request managers and stages, a hash as model, links
that lose, repeat and delay frames, processes that die and come back.

    python -m tests.faults.pipeline --seed 1 --events 20000

Every client must have exactly what it would have had alone: its tokens, in order, once, and one end. A history has many
episodes with few kinds of faults each, and behind each a calm in which all must end: what a fault leaves is found
there, before the next fault hides it. What is random comes from the seed, so that a history can be played again; the
SHA-256 of its trace is printed last.
"""

import argparse
import dataclasses
import hashlib
import random
from collections import deque
from collections.abc import Callable

from sluice_server.engine.errors import ServiceError
from sluice_server.engine.request import FinishReason, SamplingParams
from sluice_server.services.config import DEFAULTS, KV_COST
from sluice_server.services.detokenizer.stage import DetokenizerStage
from sluice_server.services.engine.stage import EngineStage
from sluice_server.services.gateway.access.call import CallMetadata
from sluice_server.services.gateway.contract.translate import TranslatedRequest
from sluice_server.services.gateway.requests.open_request import OpenRequest, RequestStatus
from sluice_server.services.messages.messages import Append, CloseInput
from sluice_server.services.messages.processes import Role
from sluice_server.services.messages.work import Generate, Scheduling, Stops, TokenPrompt, pack_ids
from sluice_server.services.tokenizer.stage import TokenizerStage
from tests.engine.scheduler.fake_model import VOCAB
from tests.faults.nodes import Alone, Front, Link, Node, alone, encoder, ids_of, independent, search

BEAT_S = 0.25
MAX_CLIENTS = 16
EPISODE = 400  # events
SHARE_OF_FAULTS = 0.25  # of the kinds of faults, in an episode
SILENT_BEATS = 16  # after which an engine that is out of reach counts as lost
DRAIN_ROUNDS = 4000


@dataclasses.dataclass
class Client:
    """One reader: what it must receive, and what it has received."""

    front: Front
    request: OpenRequest
    expected: list[Alone]
    ids: list[list[int]]
    text: list[str]
    pieces: list[tuple[int, ...]]  # of its prompt, still to be appended
    is_cancelled: bool = False


class World:
    """The history of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ids = ids_of((1, 3)[seed % 2])
        self.draining: set[str] = set()
        self.for_prompts = {"e0", "e5"} if seed % 8 == 7 else set()
        self.num_joined = self.num_left = self.num_handed_off = 0
        self.routing = KV_COST if seed % 4 == 3 else DEFAULTS.routing
        self.now = 0.0
        self.trace = hashlib.sha256()
        self.num_ended = self.num_crashes = self.num_blamed = self.num_replayed = 0
        self._epoch = 0
        self._links: dict[tuple[str, str], Link] = {}
        self.num_cuts = 0
        self.num_hedged = self.num_hedges_won = 0
        self._cut: set[tuple[str, str]] = set()  # links on which nothing arrives for a while
        self.clients: list[Client] = []
        self._events: dict[Callable[[], None], float] = {  # and how often they happen
            self.deliver: 62 * len(self.ids[Role.ENGINE]),  # and as much as a beat sends to be delivered
            self.turn_engines: 18,
            self.encode: 6,
            self.fire_timer: 6,
            self.beat: 3 / len(self.ids[Role.ENGINE]),  # as each brings probes for every engine
            self.submit: 6,
            self.read: 9,
            self.revive: 0.6,
            self.go_on: 0.3,
        }
        self._faults: dict[Callable[[], None], float] = {  # and how often, in an episode that has them
            self.cancel: 2,
            self.crash: 0.6 * len(self.ids[Role.ENGINE]),
            self.lose: 0.6 * len(self.ids[Role.ENGINE]),
            self.repeat: 0.8,
            self.stop: 0.8,
        }
        if seed % 8 in (5, 7):
            self._events |= {self.read_file: 2, self.end: 0.5, self.heal: 0.3}
            self._faults |= {self.join: 1.2, self.drain_engine: 0.4, self.leave: 1.2, self.cut: 0.6, self.hedge: 8}
        self.stopped: set[str] = set()  # engines that take and compute nothing for a while
        self.nodes: dict[str, Node] = {}
        for role, names in self.ids.items():
            for name in names:
                self.nodes[name] = Node(self, role, name)

    def clock(self) -> float:
        return self.now

    def next_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def link(self, sender: str, receiver: str) -> Link:
        return self._links.setdefault((sender, receiver), deque())

    def run(self, events: int) -> str:
        """Runs the events, episode by episode, and returns the trace's hash."""
        for _ in range(0, events, EPISODE):
            happening = self._events | {
                fault: often for fault, often in self._faults.items() if self.rng.random() < SHARE_OF_FAULTS
            }
            for _ in range(EPISODE):
                self.event(happening)
            self.drain()
        return self.trace.hexdigest()

    def event(self, often: dict[Callable[[], None], float]) -> None:
        """Runs one random event of these, by how often they happen."""
        self.now += 0.001
        (happen,) = self.rng.choices(list(often), list(often.values()))
        happen()

    def deliver(self) -> None:
        ready = [
            one
            for one, frames in self._links.items()
            if frames and self.nodes[one[1]].is_up and one[1] not in self.stopped and one not in self._cut
        ]
        if ready:
            sender, receiver = self.rng.choice(ready)
            self.nodes[receiver].receive(*self._links[sender, receiver].popleft())

    def turn_engines(self) -> None:
        for name, node in self.nodes.items():
            if node.role is Role.ENGINE and node.is_up and name not in self.stopped:
                node.stage.turn()
                node.flush()

    def encode(self) -> None:
        ready = [node for node in self.nodes.values() if node.is_up and node.pool.waiting]
        if ready:
            node = self.rng.choice(ready)
            node.pool.waiting.pop(self.rng.randrange(len(node.pool.waiting)))()
            node.flush()

    def fire_timer(self) -> None:
        ready = [node for node in self.nodes.values() if node.is_up and node.timers]
        if ready:
            node = self.rng.choice(ready)
            node.timers.pop(0)()
            node.flush()

    def beat(self) -> None:
        self.now += BEAT_S
        for node in self.nodes.values():
            if not node.is_up:
                continue
            if isinstance(node.stage, Front):
                node.stage.watch.beat(BEAT_S)
            node.leases.pass_time(BEAT_S)
            node.stage.reap()
            node.flush()

    def submit(self) -> None:
        node = self.nodes[self.rng.choice(self.ids[Role.GATEWAY])]
        if not node.is_up or len(self.clients) >= MAX_CLIENTS:
            return
        assert isinstance(node.stage, Front)
        rng, manager = self.rng, node.stage.manager
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 4, 9, 30)))]
        if rng.random() < 0.5:
            prompt = [1, 2, 3, 4, 5, 6, 7, 8, *prompt]
        params = SamplingParams(
            max_tokens=rng.randint(1, 14),
            seed=rng.getrandbits(32),
            n=rng.choice((1, 1, 1, 2, 3)),
            beam_width=3 if rng.random() < 0.08 else 0,
            ignore_eos=rng.random() < 0.5,
        )
        pieces: list[tuple[int, ...]] = []
        held = Scheduling()
        if not params.beam_width and rng.random() < 0.3:
            pieces = [tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(0, 3))]
            held = Scheduling(credit=rng.choice((None, 0, 3)), is_open=True)
        whole = (*prompt, *(token for piece in pieces for token in piece))
        outputs = search(whole, params) if params.is_search else independent(whole, params)
        stop = "" if params.is_search else self.some_words(outputs[0])
        expected = [alone(ids, stop) for ids in outputs]
        stops = Stops(tuple(filter(None, [stop])))
        work = Generate(TokenPrompt(pack_ids(prompt)), params, stops, scheduling=held)
        try:
            request = manager.open(
                CallMetadata("sim"), TranslatedRequest(work, reserve=50, num_outputs=params.n), streams=False
            )
        except ServiceError:
            return
        manager.submit(request)
        self.clients.append(
            Client(node.stage, request, expected, [[] for _ in expected], [""] * params.n, pieces, False)
        )
        node.flush()

    def some_words(self, ids: list[int]) -> str:
        """A stop string that will be found, or none."""
        words = encoder().tokenizer.decode(ids).split("\ufffd")[0]
        at = self.rng.randrange(8)
        return words[at : at + self.rng.randint(1, 3)]

    def read(self) -> None:
        if not self.clients:
            return
        client = self.rng.choice(self.clients)
        self.say(client)
        self.take(client)
        self.nodes[client.request.envelope.origin].flush()

    def say(self, client: Client) -> None:
        """Sends the next frame of a client of Converse."""
        request, manager = client.request, client.front.manager
        work = request.asked.work
        if request.outcome is not None or not isinstance(work, Generate):
            return
        is_closed = any(isinstance(change, CloseInput) for change in request.replay.changes)
        if client.pieces:
            manager.changes.change(request, Append(request.envelope, TokenPrompt(pack_ids(client.pieces.pop(0)))))
        elif work.scheduling.is_open and not is_closed:
            manager.changes.change(request, CloseInput(request.envelope))
        if request.is_spent:
            manager.changes.grant(request, 2)

    def take(self, client: Client) -> None:
        """Takes what has arrived for a client, and its end."""
        request = client.request
        while texts := request.delivery.take():
            for text in texts:
                assert text.first_index == len(client.ids[text.output_index]), "a token was lost or came twice"
                client.ids[text.output_index] += [token.id for token in text.tokens]
                client.text[text.output_index] += text.text
        if request.outcome is not None:
            self.check_end(client)
            client.front.manager.close(request)
            self.clients.remove(client)

    def check_end(self, client: Client) -> None:
        request = client.request
        self.num_ended += 1
        self.num_replayed += bool(request.envelope.attempt)
        for ids, expected in zip(client.ids, client.expected, strict=True):
            assert ids == expected.ids[: len(ids)], "another request's token"
        self.trace.update(f"{request.envelope.request_id} {request.state.name} {client.ids}\n".encode())
        if request.state is RequestStatus.FAILED:
            assert isinstance(request.outcome, ServiceError)
            assert request.outcome.reason == "ENGINE_FAULT" and max(request.replay.losses.values()) > 1, request.outcome
            self.num_blamed += 1
        elif not client.is_cancelled:
            assert request.state is RequestStatus.FINISHED, request.outcome
            ends = [output.last.finish for output in request.outputs if output.last is not None]
            for ids, text, end, expected in zip(client.ids, client.text, ends, client.expected, strict=True):
                assert ids == expected.ids
                assert text == expected.text, "the text is not that of the tokens"
                assert (end is FinishReason.STOP_STRING) == expected.is_stopped, end

    def cancel(self) -> None:
        if self.clients:
            client = self.rng.choice(self.clients)
            client.is_cancelled = True
            client.front.manager.cancel(client.request.request_id, client.request.envelope.tenant)
            self.nodes[client.request.envelope.origin].flush()

    def crash(self) -> None:
        """Ends a process: frames to it are lost; of frames from it, the last ones may be."""
        node = self.nodes[self.rng.choice(self.ids[Role.ENGINE] if self.rng.random() < 0.4 else list(self.nodes))]
        if not node.is_up:
            return
        node.is_up = False
        self.num_crashes += 1
        for (sender, receiver), frames in self._links.items():
            if receiver == node.id:
                frames.clear()
            elif sender == node.id:
                for _ in range(self.rng.randrange(len(frames) + 1)):
                    frames.pop()
        if isinstance(node.stage, Front):
            self.clients = [client for client in self.clients if client.front is not node.stage]
            return
        if self.rng.random() < 0.7:  # a supervisor tells
            for other in self.nodes.values():
                if other.is_up and isinstance(other.stage, Front):
                    names = {node.id} if self.rng.random() < 0.7 else frozenset[str]()
                    other.stage.watch.lost(names, planned=self.rng.random() < 0.7)
                    other.flush()

    def revive(self) -> None:
        down = [node for node in self.nodes.values() if not node.is_up and node.id in self.ids[node.role]]
        if down:
            self.rng.choice(down).boot()

    def stop(self) -> None:
        """Stops an engine of several, which others may find lost meanwhile."""
        engines = self.ids[Role.ENGINE]
        if len(engines) > 1:
            self.stopped.add(self.rng.choice(engines))

    def go_on(self) -> None:
        """Lets the stopped engines go on: they still have what others have taken over."""
        self.stopped.clear()

    def cut(self) -> None:
        """Cuts a process off from some others, which may all live: what is sent waits, what was sent may be lost."""
        name = self.rng.choice(list(self.nodes))
        self.num_cuts += 1
        for link, frames in self._links.items():
            if name in link and self.rng.random() < 0.7:
                self._cut.add(link)
                for _ in range(self.rng.choice((0, len(frames)))):
                    frames.pop()

    def heal(self) -> None:
        """Lets all that waits behind cut links arrive."""
        self._cut.clear()

    def hedge(self) -> None:
        """Lets a gateway send what is slow to a second engine as well."""
        node = self.nodes[self.rng.choice(self.ids[Role.GATEWAY])]
        if node.is_up and isinstance(node.stage, Front):
            node.stage.manager.hedge()
            node.flush()

    def join(self) -> None:
        """Adds an engine to the file: a new one, or one that has left and may still run."""
        engines = self.ids[Role.ENGINE]
        if len(engines) < 5:
            name = self.rng.choice([one for one in (f"e{at}" for at in range(6)) if one not in engines])
            if name not in self.nodes:
                self.nodes[name] = Node(self, Role.ENGINE, name)
            elif not self.nodes[name].is_up:
                self.nodes[name].boot()
            self.ids[Role.ENGINE] = tuple(sorted((*engines, name)))
            self.num_joined += 1

    def drain_engine(self) -> None:
        """Gives an engine no new requests."""
        left = [one for one in self.ids[Role.ENGINE] if one not in self.draining]
        if len(left) > 1:
            self.draining.add(self.rng.choice(left))

    def leave(self) -> None:
        """Takes an engine out of the file, whether it is drained or not."""
        engines = self.ids[Role.ENGINE]
        if len(set(engines) - self.draining) > 1:
            name = self.rng.choice(sorted(self.draining) or engines)
            self.ids[Role.ENGINE] = tuple(one for one in engines if one != name)
            self.draining.discard(name)
            self.num_left += 1

    def read_file(self) -> None:
        """Lets a process read the file of the engines."""
        node = self.rng.choice(list(self.nodes.values()))
        if node.is_up:
            node.read_file()
            node.flush()

    def end(self) -> None:
        """Ends the processes of engines that have left."""
        for name, node in self.nodes.items():
            if node.role is Role.ENGINE and name not in self.ids[Role.ENGINE]:
                node.is_up = False

    def lose(self) -> None:
        """Breaks a connection: the last frames on it are lost."""
        loaded = [frames for frames in self._links.values() if frames]
        if loaded:
            frames = self.rng.choice(loaded)
            for _ in range(self.rng.randint(1, len(frames))):
                frames.pop()

    def repeat(self) -> None:
        """Repeats a frame."""
        loaded = [frames for frames in self._links.values() if frames]
        if loaded:
            frames = self.rng.choice(loaded)
            at = self.rng.randrange(len(frames))
            frames.insert(self.rng.randint(at, len(frames)), frames[at])

    def drain(self) -> None:
        """Runs without further faults until every client has its answer, and checks that no process holds anything."""
        for _ in range(self.rng.choice((0, SILENT_BEATS)) if self.stopped or self._cut else 0):
            self.turn_all()  # what is out of reach is found to be so, before it is back
        self.go_on()
        self.heal()
        self.end()
        for node in self.nodes.values():
            if not node.is_up and node.id in self.ids[node.role]:
                node.boot()
            elif node.is_up:
                node.read_file()
        for _ in range(DRAIN_ROUNDS):
            self.turn_all()
            if not self.clients and self.is_empty():
                return
        raise AssertionError(f"{len(self.clients)} clients wait for ever, or something is left")

    def turn_all(self) -> None:
        """Runs one beat, in which every process has several turns, and all clients read."""
        self.beat()
        for _ in range(60 * len(self.ids[Role.ENGINE])):  # as each brings probes and reports
            self.now += 0.001
            self.deliver()
            self.encode()
            self.turn_engines()
            self.fire_timer()
        for client in list(self.clients):
            self.say(client)
            self.take(client)
        for node in self.nodes.values():
            node.flush()

    def is_empty(self) -> bool:
        """Whether no process holds anything of a request."""
        for node in self.nodes.values():
            stage = node.stage
            if not node.is_up:
                continue
            if isinstance(stage, TokenizerStage) and stage.num_encoding:
                return False
            if isinstance(stage, DetokenizerStage | EngineStage) and stage.num_open:
                return False
            if isinstance(stage, EngineStage) and stage.engine.scheduler.cache.pool.num_held:
                return False
        return True


def main() -> None:
    """Play one history."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--events", type=int, default=20_000)
    options = parser.parse_args()
    world = World(options.seed)
    digest = world.run(options.events)
    print(f"{world.num_ended} ended, {world.num_replayed} of them replayed, {world.num_crashes} crashes")
    print(digest)


if __name__ == "__main__":
    main()
