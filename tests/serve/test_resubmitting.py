"""Requests that are sent again because their answer was lost."""

from tests.serve.requests import ADAM, CROSS_ENTROPY, SEQUENCES, sample_of

BODIES = [
    ("forward-backward", {"loss": CROSS_ENTROPY, "samples": [sample_of(SEQUENCES[0])]}),
    ("optim-step", {"adam_params": ADAM}),
    ("training-checkpoint", None),
    ("inference-checkpoint", None),
]


def test_an_operation_that_has_completed_answers_with_its_output(wire, new_session):
    """Clients do not poll an operation whose submission says that it has completed."""
    session = new_session()
    for kind, body in BODIES:
        output = wire.run(session, kind, body, key=kind)
        again = wire.submit(session, kind, body, key=kind).json()
        assert again["status"] == "TRAINING_OPERATION_STATUS_COMPLETED"
        assert again["output"] == output
    assert int(wire.get(f"training-sessions/{session}").json()["step"]) == 1
