"""Runs the child process that fetches images by their URLs, one after another, until its input ends.

It decodes nothing, holds no secrets, and its parent limits its time.
"""

from sluice_server.services.media.fetch_frames import FetchAnswer, Fetched, FetchJob, FetchSetup, Unfetched
from sluice_server.services.media.fetching import Fetcher, FetchError
from sluice_server.services.process.background import lower_process
from sluice_server.services.tokenizer.child_pipe import ChildReady, begin, confine, receive, send, serve


def main() -> None:
    """Serves the parent at the other end of stdin and stdout."""
    begin()
    setup = receive(FetchSetup)
    if setup is None:
        return
    lower_process()
    confine(setup.memory_bytes)
    fetcher = Fetcher(setup.hosts, setup.max_bytes, setup.seconds)
    send(ChildReady())
    serve(FetchJob, lambda job: answered(job, fetcher))


def answered(job: FetchJob, fetcher: Fetcher) -> FetchAnswer:
    """Answers one job."""
    try:
        return Fetched(fetcher.fetch(job.url))
    except FetchError as error:
        return Unfetched(str(error))


if __name__ == "__main__":
    main()
