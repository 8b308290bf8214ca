"""The public API: configuration, forecast, plan, training with callbacks, hints and adapters; `supertuner` exports it.

    import supertuner as st

    config = st.load_config("run.yaml", overrides={"train.batch_size": 2})
    forecast = st.estimate(config, machine="gh200-96")
    result = st.train(config, callbacks=[...])

Results are frozen dataclasses with `to_dict()`. Errors are those of `supertuner.core.errors`.
"""
