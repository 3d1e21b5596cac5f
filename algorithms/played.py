"""Who answers the prompts of a job: the rollout itself, an environment, or an agent that brings its own loop.

PY-1: an environment or an agent takes the place of rollout and reward both: its groups are scored. Of its episodes as
      many may be unscored as of the job's verdicts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from algorithms.job import Job
from roles.dialogue import Dialogue
from roles.environment import EpisodeLimits, Episodes
from roles.environment_config import OWN_LOOP, environments, judge_of, players_of
from roles.rollout import Rollout
from roles.tally import tally_of_episodes

if TYPE_CHECKING:
    from algorithms.grpo import Scores
    from roles.agents import AgentEpisodes
    from runtime.mesh import HostMesh
    from runtime.tasks import TaskGroup

    Played = Rollout | Episodes | AgentEpisodes


async def played(
    job: Job, rollout: Rollout, reward: Scores, host: HostMesh, tasks: TaskGroup, *, name: str = "environment"
) -> tuple[Played, Scores]:
    """Who answers, and who judges.

    Args:
        tasks: what serves agents runs in it.
        name: of the processes of an environment that has its own.
    """
    config = job.environment
    if not config.name:
        return rollout, reward
    from transformers import AutoTokenizer

    options = {name: value for name, value in job.data.chat_template_options.items() if name != "tools"}
    dialogue = Dialogue(AutoTokenizer.from_pretrained(job.model.path, local_files_only=True), options)
    what = f"[environment] name {config.name!r}"
    tally = tally_of_episodes(what, max_unscored=job.reward.max_unscored, window=job.reward.window)
    if config.name in OWN_LOOP:
        from roles.agents import AgentEpisodes, serve  # with a web server, which other jobs need not wait for
        from roles.openai_server import OpenAIServer

        server = OpenAIServer(rollout, dialogue, max_len=config.tokens)
        await serve(server, tasks)
        agents = AgentEpisodes(server, await players_of(config, judge_of(reward.score), host, name), tally)
        return agents, agents
    episodes = Episodes(
        rollout,
        environments(config, judge_of(reward.score)),
        dialogue,
        EpisodeLimits(turns=config.turns, tokens=config.tokens, seconds=config.seconds),
        tally,
    )
    return episodes, episodes
