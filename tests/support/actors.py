"""Runs models of barrier protocols: actors are generators that yield what they wait for."""

import random


def run_actors(actors, copiers):
    """True when every actor came to its end, False where none can move.

    The next to move is drawn anew each time. copiers: objects whose list in_flight holds the copy
    engine's arrivals, which come in any order.
    """
    waiting = {actor: next(actor) for actor in actors}
    while waiting:
        moves = [actor for actor, condition in waiting.items() if condition()]
        moves += [copier for copier in copiers if copier.in_flight]
        if not moves:
            return False
        move = random.choice(moves)
        if move not in waiting:
            move.in_flight.pop(random.randrange(len(move.in_flight)))()
            continue
        try:
            waiting[move] = next(move)
        except StopIteration:
            del waiting[move]
    return True
