"""Summarization, scored by ROUGE-2 against a reference: XSum, CNN/DailyMail, and the category of Spec-Bench."""

import functools
from typing import Any

from bass_jax.experiments.tasks.base import Problem, Row, Task, register_task


def read_xsum(row: Row) -> Problem:
    """Asks for one sentence about a BBC article."""
    document = row["document"]
    return Problem(
        id=str(row["id"]),
        question=f"Summarize this article in one sentence.\n\n{document}",
        text=f"{document}\n\nTL;DR:",
        row={"reference": row["summary"]},
    )


def read_cnn_dailymail(row: Row) -> Problem:
    """Asks for the highlights of a news article, from a row of CNN/DailyMail or of Spec-Bench."""
    if "turns" in row:
        article = row["turns"][0].removeprefix("Summarize:").strip()
        # Spec-Bench has references in this category only.
        id, reference = str(row["question_id"]), (row.get("reference") or [""])[0]
    else:
        article, id, reference = row["article"], str(row["id"]), row["highlights"]
    return Problem(
        id=id,
        question=f"Summarize: {article}",
        text=f"{article}\n\nTL;DR:",
        category=row.get("category", ""),
        row={"reference": reference},
    )


def score(problem: Problem, answer: str) -> dict[str, float]:
    """Returns the F-measure of bigrams.

    Raises:
        ValueError: if the library rouge-score is not installed.
    """
    return {"rouge_2": float(_scorer().score(problem.row["reference"], answer)["rouge2"].fmeasure)}


@functools.cache
def _scorer() -> Any:
    try:
        from rouge_score import rouge_scorer
    except ImportError:
        raise ValueError("ROUGE-2 needs the library rouge-score: pip install 'bass-jax[tasks]'") from None
    return rouge_scorer.RougeScorer(["rouge2"], use_stemmer=True)


XSUM = register_task(
    Task(
        name="xsum",
        data="datasets:EdinburghNLP/xsum:test",
        read=read_xsum,
        score=score,
        measure="rouge_2",
        text_stop_strings=("\n",),
    )
)
"""Source: Narayan et al. 2018 (arXiv 1808.08745)."""

CNN_DAILYMAIL = register_task(
    Task(
        name="cnn_dailymail",
        data="datasets:abisee/cnn_dailymail:3.0.0:test",
        read=read_cnn_dailymail,
        score=score,
        measure="rouge_2",
        text_stop_strings=("\n\n",),
    )
)
"""Source: See et al. 2017 (arXiv 1704.04368)."""
