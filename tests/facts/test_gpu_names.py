from legroom.facts import gpus


def test_a_name_as_written_and_the_same_name_squeezed_mean_one_card():
    names = [entry["name"] for entry in gpus._data()["gpus"]]
    names += [alias for entry in gpus._data()["gpus"] for alias in entry["aliases"]] + list(gpus._data()["ambiguous"])
    for name in names:
        squeezed = gpus._read(*gpus._index()[gpus._key(name)])
        assert gpus.gpu(name) == squeezed, name
