"""What several RPCs of SubscriptionService answer in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from noetl_grpc.core.lifecycle import Subscription
from noetl_grpc.errors import NotFound


def merge(answers: Sequence[Sequence[Subscription]], limit: int) -> tuple[list[Subscription], bool]:
    """The first of what all shards found, by id, and whether there are more."""
    found = sorted(chain.from_iterable(answers), key=lambda subscription: subscription.subscription_id)
    return found[:limit], len(found) > limit


def subscription_not_found(subscription_id: int) -> NotFound:
    """The answer about a subscription that does not exist."""
    return NotFound(
        f"there is no subscription {subscription_id}",
        reason="SUBSCRIPTION_NOT_FOUND",
        metadata={"subscription_id": subscription_id},
    )
