"""The course: experiments that show what mixed precision does, each measured on this machine.

An experiment (``experiment.py``) is one value: a question, up to three things to change, a
measurement that returns plain numbers, a drawing of them, and the sentence that follows from them.
``course.py`` lists them, ``experiments/`` has a file for each, ``material.py`` the model, text and
training that they share, ``words.toml`` every word in English and in Chinese.
"""
