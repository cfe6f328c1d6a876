"""Decides which tokens run next. Pure Python: the clock is passed in, no tensor is seen.

scheduler   the way in: add, cancel, grant, append, update, plan and apply
door        what may come in            waiting     the queue, and its bounds
policies    who goes first              admission   who is given slots now (census, peak, lengths: what it goes by)
planner     who computes in this step   turns       how prompts share it      victims   who gives way
ahead       who computes in a step that is planned before the last one is applied      flights   steps in flight
floor       who is where: the one place that changes a sequence's state
outputs     what sampled tokens make of it               beam   who goes on in a search
group, sequence, events, settings, pace   values and state
"""
